"""Temporary folders that go even if their process is killed: whoever makes the next one removes those whose owner is gone."""

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
    """A folder of this process's own, for as long as the context lasts."""
    sweep()
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name, _owned(Path(name)):
        yield Path(name)


def sweep() -> None:
    """Remove what processes that were killed have left. A lock says whose owner lives, and ends with it wherever that runs."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails as long as its owner lives
            shutil.rmtree(lock.parent, ignore_errors=True)


@contextlib.contextmanager
def _owned(folder: Path) -> Iterator[IO[bytes]]:
    """Hold the folder's lock. It gets its name when it is locked, so that nobody finds it free."""
    unnamed = folder / f"{_LOCK}.new"
    with unnamed.open("xb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        os.rename(unnamed, folder / _LOCK)
        yield stream
