"""The coordinator's journal: one entry an epoch, on disk before any member acts on it, so that a new coordinator can take over.

`Journal` has two methods, so that a replicated store can replace the file.
"""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from recycle.core.errors import FileProblem


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """An epoch: the member number at each place, the first iteration, the plan, and the last member number given out.

    `processes` has host, process id and start of the member at each place: a coordinator that takes over can fence it, and no
    later process with that id. `origin` is that of `StartEpoch`. `reporters` has, for each earlier iteration that is not in the
    record yet, the members that must still report it. `only_saves` is that of `StartEpoch`.
    """

    epoch: int
    iteration: int
    places: Mapping[str, int]
    plan: str
    reason: str
    last_number: int
    processes: Mapping[str, tuple[str, int, str]] = field(default_factory=dict)
    origin: int = 1
    reporters: Mapping[int, Sequence[int]] = field(default_factory=dict)
    only_saves: bool = False


class Journal(Protocol):
    def append(self, entry: JournalEntry) -> None:
        """Store an entry durably before returning."""

    def last(self) -> JournalEntry | None: ...


class FileJournal:
    """A journal in a file, a line an entry; a last line that was cut short counts as not written."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, entry: JournalEntry) -> None:
        try:
            with self._path.open("a+b") as stream:
                # A line that was cut short must not swallow this one.
                stream.write((b"" if _ends_with_newline(stream) else b"\n") + json.dumps(asdict(entry)).encode() + b"\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as problem:
            # An older entry must not be taken for the last one: its epoch is over.
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
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


def _entry(processes: Mapping[str, Any], reporters: Mapping[str, Any], **values: Any) -> JournalEntry:
    """Return an entry from its JSON, which has lists for tuples, and text for numbers that are keys."""
    late = {int(iteration): numbers for iteration, numbers in reporters.items()}
    return JournalEntry(**values, processes={place: tuple(each) for place, each in processes.items()}, reporters=late)


def _ends_with_newline(stream: BinaryIO) -> bool:
    """Whether the file is empty or its last line is complete."""
    if stream.seek(0, os.SEEK_END) == 0:
        return True
    stream.seek(-1, os.SEEK_END)
    return stream.read(1) == b"\n"
