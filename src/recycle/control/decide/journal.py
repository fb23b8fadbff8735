"""What the coordinator decided, kept so that another can take its place: one entry an epoch, on disk before anybody acts on it.

The interface is two functions, so that a replicated store can stand in for the file.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from recycle.core.errors import FileProblem


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """An epoch: who sits where, each with its member's number, and from which iteration they go on.

    `processes` says for each seat on which host, and by which number there, its member runs: whoever takes the coordinator's
    place can still fence it.
    """

    epoch: int
    iteration: int
    seats: Mapping[str, int]
    plan: str
    reason: str
    next_member: int
    processes: Mapping[str, tuple[str, int]] = field(default_factory=dict)


class Journal(Protocol):
    def append(self, entry: JournalEntry) -> None:
        """Keep an entry; it is kept when this returns."""
        ...

    def last(self) -> JournalEntry | None: ...


class FileJournal:
    """A journal in a file, a line an entry; a last line that was cut short counts as not written."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, entry: JournalEntry) -> None:
        try:
            with self._path.open("a+b") as stream:
                # A line that was cut short must not swallow this one.
                stream.write((b"" if _is_whole(stream) else b"\n") + json.dumps(asdict(entry)).encode() + b"\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as problem:
            raise FileProblem(f"cannot write {self._path}: {problem.strerror or problem}") from None

    def last(self) -> JournalEntry | None:
        try:
            lines = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return None
        except OSError as problem:
            raise FileProblem(f"cannot read {self._path}: {problem.strerror or problem}") from None
        for line in reversed(lines):
            try:
                return _entry(**json.loads(line))
            except (ValueError, TypeError):
                continue
        return None


def _entry(**told: Any) -> JournalEntry:
    """An entry from its JSON, which knows no tuples."""
    processes = told.pop("processes", {})
    return JournalEntry(**told, processes={seat: (host, pid) for seat, (host, pid) in processes.items()})


def _is_whole(stream: BinaryIO) -> bool:
    """Whether the last line of a file, if there is one, has its end."""
    if stream.seek(0, os.SEEK_END) == 0:
        return True
    stream.seek(-1, os.SEEK_END)
    return stream.read(1) == b"\n"


class MemoryJournal:
    """A journal that is gone with its process."""

    def __init__(self) -> None:
        self._entries: list[JournalEntry] = []

    def append(self, entry: JournalEntry) -> None:
        self._entries.append(entry)

    def last(self) -> JournalEntry | None:
        return self._entries[-1] if self._entries else None
