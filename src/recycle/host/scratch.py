"""`scratch`: a temporary folder that is removed even after SIGKILL, by the next process that makes one."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_PREFIX = "recycle-"
_LOCK = "owner.lock"


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder of this process, removed at the end of the block."""
    sweep()
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name, _owned(Path(name)):
        yield Path(name)


def sweep() -> None:
    """Remove the folders of killed processes. A live owner holds the lock of its folder; the lock ends with the process."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the owner lives
            shutil.rmtree(lock.parent, ignore_errors=True)


@contextlib.contextmanager
def _owned(folder: Path) -> Iterator[IO[bytes]]:
    """Hold the folder's lock. The lock file gets its name when it is locked, so that no process finds it unlocked."""
    unnamed = folder / f"{_LOCK}.new"
    with unnamed.open("xb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        os.rename(unnamed, folder / _LOCK)
        yield stream
