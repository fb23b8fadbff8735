"""`FileStore`: the journal in a file of one machine. Its lock is the leadership, and ends with the process that holds it."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from recycle.control.decide.journal import JournalEntry, entry_from_json, entry_to_json
from recycle.control.store.protocol import Leader
from recycle.core.errors import FileProblem, LeadershipLost

_POLL_S = 0.05


class FileStore:
    """A line an entry, and a line for every term; a last line that was cut short counts as not written.

    A file that cannot be opened for writing is led all the same: a full or read-only disk does not end a job.
    """

    lease_s = 0.0

    def __init__(self, path: Path) -> None:
        self._path = path
        self.term = 0
        self._leads = False
        self._lock: BinaryIO | None = None

    def campaign(self) -> Leader | None:
        if not self._take_lock():
            return Leader(self._last_term(), f"the process that holds {self._path}")
        self.term, self._leads = self._last_term() + 1, True
        with contextlib.suppress(FileProblem):
            self._write({"term": self.term})
        return None

    def _take_lock(self) -> bool:
        """Lock the file, if it can be opened and its file system has locks; return whether no other process has the lock."""
        with contextlib.suppress(OSError):
            stream = self._path.open("ab")
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stream.close()
                return False
            except OSError:  # a file system without locks
                stream.close()
            else:
                if not os.path.samestat(os.fstat(stream.fileno()), self._path.stat()):  # another process has just replaced it
                    stream.close()
                    return False
                self._lock = stream
        return True

    def renew(self) -> None:
        if not self._leads:
            raise LeadershipLost(f"this process does not lead the job of {self._path} any more")

    def append(self, entry: JournalEntry) -> None:
        self.renew()
        try:
            self._write({"term": self.term, **entry_to_json(entry)})
        except FileProblem:
            self._forget()
            raise

    def last(self) -> JournalEntry | None:
        for line in self._last_lines():
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                return entry_from_json({name: value for name, value in line.items() if name != "term"})
        return None

    def watch(self, timeout_s: float) -> None:
        end_s, before = time.monotonic() + timeout_s, self._size_bytes()
        while time.monotonic() < end_s and self._size_bytes() == before:
            time.sleep(_POLL_S)

    def _size_bytes(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def discard(self) -> None:
        self.renew()
        self._forget()

    def resign(self) -> None:
        self._leads = False
        self._release_lock()

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _write(self, line: object) -> None:
        try:
            with self._path.open("a+b") as stream:
                # A line that was cut short must not swallow this one.
                stream.write((b"" if _ends_with_newline(stream) else b"\n") + json.dumps(line).encode() + b"\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as problem:
            raise FileProblem(f"cannot write {self._path}: {problem.strerror or problem}") from None

    def _forget(self) -> None:
        """Have no entry: an older one must not be taken for the last one, since its epoch is over. The term stays, if it can.

        Raises FileProblem if the file can be neither emptied nor removed, LeadershipLost if another process has it since then.
        """
        try:
            os.truncate(self._path, 0)
        except FileNotFoundError:
            pass
        except OSError as problem:
            self._replace(problem)
        with contextlib.suppress(FileProblem):
            self._write({"term": self.term})

    def _replace(self, cause: OSError) -> None:
        """Remove the file, which cannot be emptied, with the lock on it: that of a file that is gone would keep nobody away."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError:  # the lock stays: it is all that keeps others from the old entry
            raise FileProblem(
                f"{self._path} holds an entry that is over, and can be neither emptied ({cause.strerror or cause}) nor removed: "
                "remove it before this coordinator ends, since another one would go on with that entry"
            ) from None
        self._release_lock()
        if not self._take_lock():
            self._leads = False
            raise LeadershipLost(f"{self._path} was removed, since it could not be emptied, and another process has it now")

    def _last_term(self) -> int:
        terms = (line.get("term") for line in self._last_lines())
        return next((term for term in terms if type(term) is int), 0)  # terms only grow

    def _last_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines that are whole, the last one first: each may hold a plan of megabytes, and few are looked at."""
        try:
            texts = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        except OSError as problem:
            raise FileProblem(f"cannot read {self._path}: {problem.strerror or problem}") from None
        for text in reversed(texts):
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict):
                    yield line


def _ends_with_newline(stream: BinaryIO) -> bool:
    """Whether the file is empty or its last line is complete."""
    if stream.seek(0, os.SEEK_END) == 0:
        return True
    stream.seek(-1, os.SEEK_END)
    return stream.read(1) == b"\n"
