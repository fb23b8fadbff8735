"""`RecordTail`: the lines that were added to a record since it was read last, also if the record was cut or written anew."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from recycle.core.errors import FileProblem
from recycle.core.events.record_file import refuse_other_head
from recycle.dashboard.reading.served_folder import ServedFolder

# So many bytes before the position are compared, to see that the file is still the same.
_COMPARED_BYTES = 200


class RecordTail:
    """Reads a record line by line while it grows.

    `generation` counts how often it began at the start of the file: what was read before does not hold any more then.
    """

    def __init__(self, path: Path, folder: ServedFolder | None = None) -> None:
        self.path = path
        self._folder = folder or ServedFolder(path.parent)
        self.generation = 1
        self.position = 0
        self._last_line = b""
        self._file: tuple[int, int] | None = None

    def begin_again(self) -> None:
        """Read from the start of the file, as a new generation."""
        self.generation += 1
        self.position, self._last_line, self._file = 0, b"", None

    def begin_again_if_replaced(self) -> bool:
        """Begin again if the bytes before the position are not those that were read; return whether it did.

        So it does if a coordinator that took over has cut the record, or a resumed run has written it anew.
        """
        try:
            with self._folder.open(self.path) as stream:
                status = os.fstat(stream.fileno())
                file = status.st_dev, status.st_ino
                is_same = self._file in (None, file) and status.st_size >= self.position
                if is_same and (before := self._last_line[-_COMPARED_BYTES:]):
                    stream.seek(self.position - len(before))
                    is_same = stream.read(len(before)) == before
        except OSError:  # there is no record yet, or no longer
            is_same, file = self.position == 0, None
        if not is_same:
            self.begin_again()
        self._file = file
        return not is_same

    def read(self, most_bytes: int) -> Iterator[tuple[int, bytes]]:
        """Yield each new whole line with its position in the file, about `most_bytes` in all.

        The first line, which says what the file is, is checked and left out. Raises FileProblem if there is no such file, or it
        is no record.
        """
        try:
            with self._folder.open(self.path) as stream:
                stream.seek(self.position)
                yield from self._lines(stream, self.position + most_bytes)
        except FileNotFoundError:
            raise FileProblem(f"cannot read {self.path}: there is no such file yet") from None
        except OSError as problem:
            raise FileProblem(f"cannot read {self.path}: {problem.strerror or problem}") from None

    def _lines(self, stream: BinaryIO, end: int) -> Iterator[tuple[int, bytes]]:
        for line in stream:
            if not line.endswith(b"\n"):  # it is being written, or its writer died
                return
            start = self.position
            if start == 0:
                refuse_other_head(line, self.path)
            self.position += len(line)
            self._last_line = line
            if start:
                yield start, line
            if self.position >= end:
                return
