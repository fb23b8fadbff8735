/* Preloaded into the processes of a job by fault_library.py. A control file, mapped by all of them, says which calls fail or are slow.

   A path is hit if it contains the control's text: then calls that change the disk wait, and fail with an errno. CLOCK_REALTIME is
   moved by an offset, for one process or all of them; waits until a time of that clock follow it, as they do if a real clock is set. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct control {
    double clock_offset_s, delay_s;
    int clock_pid, fail_errno; /* clock_pid 0: every process */
    char text[256];
};

static volatile struct control *control;

__attribute__((constructor)) static void map_control(void) {
    const char *path = getenv("CHAOS_CONTROL");
    int file = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        void *mapped = mmap(NULL, sizeof(struct control), PROT_READ, MAP_SHARED, file, 0);
        if (mapped != MAP_FAILED) control = mapped;
        close(file);
    }
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* The disk. */

static int is_active(void) { return control && control->text[0] && (control->fail_errno || control->delay_s > 0); }

static int fails(const char *path) {
    if (!strstr(path, (const char *)control->text)) return 0;
    double delay_s = control->delay_s;
    if (delay_s > 0) {
        struct timespec pause = {(time_t)delay_s, (long)((delay_s - (time_t)delay_s) * 1e9)};
        nanosleep(&pause, NULL);
    }
    if (!control->fail_errno) return 0;
    errno = control->fail_errno;
    return 1;
}

static int fails_at(int folder, const char *name) {
    char link[64], path[2 * PATH_MAX];
    if (!is_active()) return 0;
    if (name && (name[0] == '/' || folder == AT_FDCWD)) return fails(name);
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t length = readlink(link, path, PATH_MAX);
    if (length < 0) return 0;
    snprintf(path + length, PATH_MAX, "/%s", name ? name : "");
    return fails(path);
}

static int fails_file(int file) { return fails_at(file, NULL); }
static int fails_path(const char *path) { return is_active() && fails(path); }

ssize_t write(int file, const void *bytes, size_t num) { return fails_file(file) ? -1 : NEXT(write)(file, bytes, num); }
ssize_t writev(int file, const struct iovec *parts, int num) { return fails_file(file) ? -1 : NEXT(writev)(file, parts, num); }
int fsync(int file) { return fails_file(file) ? -1 : NEXT(fsync)(file); }
int fdatasync(int file) { return fails_file(file) ? -1 : NEXT(fdatasync)(file); }
int ftruncate64(int file, off64_t size) { return fails_file(file) ? -1 : NEXT(ftruncate64)(file, size); }
int mkdir(const char *path, mode_t mode) { return fails_path(path) ? -1 : NEXT(mkdir)(path, mode); }

/* A full disk still renames and removes; a read-only one does not. */
#define UNLESS_READ_ONLY(condition) (control && control->fail_errno == EROFS && (condition))
int rename(const char *from, const char *to) { return UNLESS_READ_ONLY(fails_path(to)) ? -1 : NEXT(rename)(from, to); }
int unlink(const char *path) { return UNLESS_READ_ONLY(fails_path(path)) ? -1 : NEXT(unlink)(path); }
int rmdir(const char *path) { return UNLESS_READ_ONLY(fails_path(path)) ? -1 : NEXT(rmdir)(path); }
int truncate64(const char *path, off64_t size) { return UNLESS_READ_ONLY(fails_path(path)) ? -1 : NEXT(truncate64)(path, size); }
int unlinkat(int folder, const char *name, int flags) {
    return UNLESS_READ_ONLY(fails_at(folder, name)) ? -1 : NEXT(unlinkat)(folder, name, flags);
}

static int fails_to_open(int folder, const char *name, int flags) {
    int changes = control && control->fail_errno == EROFS ? (flags & O_ACCMODE) != O_RDONLY : flags & O_CREAT;
    return changes && !(flags & __O_TMPFILE & ~O_DIRECTORY) && fails_at(folder, name);
}

#define MODE(flags, last) ({ va_list rest; va_start(rest, last); mode_t m = (flags) & O_CREAT ? va_arg(rest, mode_t) : 0; va_end(rest); m; })
int open(const char *path, int flags, ...) {
    mode_t mode = MODE(flags, flags);
    return fails_to_open(AT_FDCWD, path, flags) ? -1 : NEXT(open)(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    mode_t mode = MODE(flags, flags);
    return fails_to_open(AT_FDCWD, path, flags) ? -1 : NEXT(open64)(path, flags, mode);
}
int openat(int folder, const char *path, int flags, ...) {
    mode_t mode = MODE(flags, flags);
    return fails_to_open(folder, path, flags) ? -1 : NEXT(openat)(folder, path, flags, mode);
}
int openat64(int folder, const char *path, int flags, ...) {
    mode_t mode = MODE(flags, flags);
    return fails_to_open(folder, path, flags) ? -1 : NEXT(openat64)(folder, path, flags, mode);
}

/* The clock. */

static double offset_s(void) { return control && (!control->clock_pid || control->clock_pid == getpid()) ? control->clock_offset_s : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = NEXT(clock_gettime);
    int result = real(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += (time_t)offset_s();
    return result;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec read;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &read);
    *now = (struct timeval){read.tv_sec, read.tv_nsec / 1000};
    return 0;
}
time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}

/* Wait in slices until the moved clock has reached `until`. Times of the monotonic clock, which some conditions use, are small. */
#define IN_SLICES(until, wait_until)                                                                     \
    for (;;) {                                                                                           \
        struct timespec now, slice;                                                                      \
        clock_gettime(CLOCK_REALTIME, &now);                                                             \
        double left_s = (double)((until)->tv_sec - now.tv_sec) + 1e-9 * (double)((until)->tv_nsec - now.tv_nsec); \
        double part_s = left_s > 0.1 ? 0.1 : left_s > 0 ? left_s : 0;                                    \
        syscall(SYS_clock_gettime, CLOCK_REALTIME, &slice);                                              \
        slice.tv_nsec += (long)(part_s * 1e9);                                                           \
        slice.tv_sec += slice.tv_nsec / 1000000000L;                                                     \
        slice.tv_nsec %= 1000000000L;                                                                    \
        int is_last = left_s <= 0.1;                                                                     \
        wait_until                                                                                       \
    }

#define IS_MONOTONIC(until) ((until)->tv_sec < 1000000000L)

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real) real = NEXT(pthread_cond_timedwait);
    if (!control || IS_MONOTONIC(until)) return real(condition, mutex, until);
    IN_SLICES(until, {
        int result = real(condition, mutex, &slice);
        if (result != ETIMEDOUT || is_last) return result;
    })
}
int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    if (!control) return NEXT(sem_timedwait)(semaphore, until);
    IN_SLICES(until, {
        int result = NEXT(sem_timedwait)(semaphore, &slice);
        if (result == 0 || errno != ETIMEDOUT || is_last) return result;
    })
}
