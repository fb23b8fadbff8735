"""return_free_memory: give memory that this process has freed back to the system."""

import ctypes


def return_free_memory() -> None:
    """Let the C library return what was freed. glibc keeps it for each thread, also for those that have ended."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other libraries have none, and need none
    if trim is not None:
        trim(0)
