"""`locked`: at most one process works in a folder. The lock ends with the process that holds it, however that ends."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from recycle.core.errors import FileProblem

_LOOK_S = 0.05


@contextmanager
def locked(folder: Path, is_required: bool = True, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock of a folder inside the block. A folder that is not there, or a file system without locks, is not locked.

    Unless the lock `is_required`, another process may hold it: something else decides then who works in the folder. A required
    lock is waited for, up to `wait_s`.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            try:
                _lock(descriptor, wait_s if is_required else 0.0)
            except BlockingIOError:
                if not is_required:
                    raise
                problem = f"{folder} is in use by another run: wait until that is over, or name another folder"
                raise FileProblem(problem) from None
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_LOOK_S)
