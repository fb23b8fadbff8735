"""`ServedFolder`: opens files below one folder without following links, so that no link shows another file of this machine."""

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from recycle.core.errors import FileProblem

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class ServedFolder:
    """The folder that a server serves. Whoever may write there can put a link into it at any time: each opening looks anew."""

    root: Path

    def open(self, path: Path) -> BinaryIO:
        """Open a plain file at or below the folder; raises OSError if it is a link, lies below one, or is no plain file.

        Each folder on the way is opened in the one before, so that none can be exchanged for a link meanwhile.
        """
        *folders, name = path.relative_to(self.root).parts
        folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in folders:
                below = _opened(part, folder, os.O_DIRECTORY)
                os.close(folder)
                folder = below
            # A pipe without a writer would be waited for.
            file = _opened(name, folder, os.O_NONBLOCK)
        finally:
            os.close(folder)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(errno.EINVAL, "it is no plain file")
        return os.fdopen(file, "rb")

    def read_text(self, path: Path) -> str:
        """Return the text of a file; raises OSError or UnicodeDecodeError."""
        with self.open(path) as stream:
            return stream.read().decode("utf-8")

    def read_file(self, path: Path) -> str:
        """Return the text of a file; raises FileProblem with a sentence."""
        try:
            return self.read_text(path)
        except OSError as problem:
            raise FileProblem(f"cannot read {path.name}: {problem.strerror or problem}") from None
        except UnicodeDecodeError:
            raise FileProblem(f"cannot read {path.name}: it is no text") from None


def _opened(name: str, folder: int, flag: int) -> int:
    try:
        return os.open(name, _FLAGS | flag, dir_fd=folder)
    except OSError as problem:
        if problem.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise OSError(errno.ELOOP, "it is a link or lies below one, and the page follows no links") from None
