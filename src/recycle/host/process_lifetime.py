"""Lifetime of child processes: a child ends with its parent, never sees Ctrl-C, and is never started by half."""

import ctypes
import multiprocessing
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from types import FrameType

_LOOK_S = 0.5
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """End this process when its parent ends, even by SIGKILL; a thread waits for that."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def stop_with_parent() -> None:
    """Send SIGTERM to this process when its parent has ended, even by SIGKILL: a request to stop, which a handler can meet.

    It is for a process that `subprocess` started; a thread looks for the parent.
    """
    threading.Thread(target=_look_for_parent, args=(os.getppid(),), daemon=True).start()


def _look_for_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)


def close_inherited_files(keep: int) -> None:
    """Close every file descriptor that this child process has from its parent, but for `keep` and the standard streams."""
    parent = multiprocessing.parent_process()
    kept = {0, 1, 2, keep, parent.sentinel if parent is not None else keep}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        if int(name) not in kept:
            with suppress(OSError):  # the listing itself was a descriptor
                os.close(int(name))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread of the process `parent` that forked it has ended, however that ends.

    It holds even while this process runs code that lets no other thread run. Elsewhere than on Linux nothing is done.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before
            os._exit(1)


def close_inherited_sockets() -> None:
    """Close every connection that this forked process has from its parent: it must end when the parent does."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        with suppress(OSError):  # the listing itself was a descriptor
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.close(int(name))


def refuse_without_descriptors(num: int) -> None:
    """Raise the operating system's error if this process may not open `num` more files.

    Python's fork server ends, and all its children with it, if a process has no descriptor left in the middle of a request.
    """
    opened: list[int] = []
    try:
        for _ in range(num):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for descriptor in opened:
            os.close(descriptor)


@contextmanager
def children_uninterrupted() -> Iterator[None]:
    """Start processes in this block with SIGINT blocked: a terminal sends Ctrl-C to all, but the parent ends them."""
    resource_tracker.ensure_running()  # else Python starts it with the first process, and unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Defer the first interrupt to the end of the block, so that no process is started by half; the second one is not deferred.

    Python interrupts only the main thread, and only if SIGINT has a Python handler; otherwise nothing is deferred.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            handler(number, frame)

    try:
        signal.signal(signal.SIGINT, hold)
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(received) == 1:
            signal.raise_signal(signal.SIGINT)


def process_state(pid: int) -> str:
    """The state letter of a process in /proc (R running, S sleeping, T stopped); empty if there is no such process."""
    return _status(pid, 0)


def process_start(pid: int) -> str:
    """When a process started, in ticks of the machine: another process with the same id started later. Empty if unknown."""
    return _status(pid, 19)


def _status(pid: int, field: int) -> str:
    """A field of /proc/PID/stat behind the name of the program."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()[field]
    except (OSError, IndexError):
        return ""
