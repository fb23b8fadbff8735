"""The files of a run's record: events as numbered lines of JSON, and the plans of its epochs."""

import errno
import json
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from io import BufferedReader
from itertools import chain, count
from math import isfinite
from pathlib import Path
from typing import get_args

from msgspec import DecodeError, ValidationError
from msgspec.json import Decoder
from msgspec.structs import fields

from recycle.core.errors import FileProblem, UserError
from recycle.core.events.record import Event, OpRan, OpsRan, Recovered, Resumed, Stepped, name_of
from recycle.core.files import refuse_device, write_parts

FORMAT, VERSION = "recycle-record", 1
# The names in a run folder; `PLAN` is the plan of the first epoch, and the folder `PLANS` has those of later epochs.
PLAN, PLANS, RECORD, SUMMARY, CHECKPOINTS = "plan.json", "plans", "record.jsonl", "summary.json", "checkpoints"
CONFIG = "config.toml"  # by which `recycle train` and `recycle coordinator` made the run
JOB = "job.json"  # what the coordinator of several machines has begun
_PLAN_FILE = re.compile(r"from-iteration-(\d{1,18})\.json")
# What a reader says of a record whose writer was killed.
CUT_OFF = "its last line is cut off"
# The key of a line's own number, which no event has: with it a reader finds out that lines are missing.
_LINE = "line"
# It stands last.
_LINE_NUMBER = re.compile(rb'"line":(\d{1,18})\}\s*\Z')
_LONGEST_NUMBER = 32
_OPS = tuple(f'{{"event":"{name_of(kind)}"'.encode() for kind in (OpRan, OpsRan))
# One encoder for all lines: `json.dumps` with these options would make one for each.
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
_DEFAULTS = {kind: {field.name: field.default for field in fields(kind)} for kind in get_args(Event)}
_NAMES = frozenset(map(name_of, _DEFAULTS))
_NO_EVENT = "this is not an event of a record"
# Checks the type of every value: a record is a text file that may have been edited.
_decoder = Decoder[Event](Event)


class NotJson(UserError):
    """A line is no JSON: the writer of a record died while it wrote its last line, or the file was damaged."""


def plan_file(iteration: int) -> str:
    """Return the file, in a run folder, of the plan that the run followed from this iteration on."""
    return f"{PLANS}/from-iteration-{iteration}.json"


def later_plans(folder: Path) -> dict[int, Path]:
    """Return the plan files of a run's later epochs by their first iteration, in order."""
    # There is no such folder if a run was recorded without them, or had one epoch.
    paths = (path for path in (folder / PLANS).glob("*.json") if _PLAN_FILE.fullmatch(path.name))
    return dict(sorted((int(path.stem.rpartition("-")[2]), path) for path in paths))


def dump_event(event: Event, number: int) -> str:
    """Return the event as a line of JSON with its number in the file, without fields that have their default.

    A number that is not finite becomes null.
    """
    written = {name: value for name, default in _DEFAULTS[type(event)].items() if (value := getattr(event, name)) != default}
    try:
        return _encode({"event": name_of(event), **written, _LINE: number})
    except ValueError:  # JSON has no numbers that are not finite
        finite = {name: None if isinstance(value, float) and not isfinite(value) else value for name, value in written.items()}
        return _encode({"event": name_of(event), **finite, _LINE: number})


def write_record(path: Path | str, events: Iterable[Event]) -> None:
    """Write a whole record in one step. Events may come from the file that is replaced."""
    head = json.dumps({"format": FORMAT, "version": VERSION})
    lines = chain([head], map(dump_event, events, count(2)))
    write_parts(Path(path), (f"{line}\n".encode() for line in lines))


class RecordWriter:
    """A record that grows while a run goes on, line by line. It begins with `events`, and replaces the file at `path`.

    With None for `events` it adds to the file.
    """

    def __init__(self, path: Path, events: Iterable[Event] | None = ()) -> None:
        if events is not None:
            write_record(path, events)
        with path.open("rb") as written:
            self._num_lines = sum(1 for _ in written)
        self._stream = path.open("ab", buffering=0)
        self._unwritten = bytearray()

    @property
    def num_unwritten_bytes(self) -> int:
        return len(self._unwritten)

    def write(self, *events: Event) -> None:
        """Add events, and hand them to the operating system: they stay if this process is killed.

        After an error, they stay in memory, and the next call tries again.
        """
        self._unwritten += "".join(f"{line}\n" for line in map(dump_event, events, count(self._num_lines + 1))).encode()
        self._num_lines += len(events)
        del self._unwritten[: self._stream.write(self._unwritten)]
        if self._unwritten:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._stream.close()


def read_record(
    path: Path | str, num_bytes_without_ops: int = 0, gaps: list[str] | None = None, is_packed: bool = False
) -> Iterator[Event]:
    """Yield the events of a record; a last line that was cut short, because its writer died, is left out.

    An `OpRan` stands for each op of an `OpsRan`, unless it `is_packed`.
    Ops in the first `num_bytes_without_ops` bytes are left out, too: they are most of a record, and reading it is faster so.
    A clause for each place where lines are cut or missing is added to `gaps`; records of the first releases do not number lines.
    """
    refuse_device(Path(path))
    try:
        with Path(path).open("rb") as stream:  # bytes, because a line may be cut inside a character
            yield from _read_events(stream, path, num_bytes_without_ops, [] if gaps is None else gaps, is_packed)
    except OSError as problem:
        raise FileProblem(f"cannot read {path}: {problem.strerror or problem}") from None


def _read_events(
    stream: BufferedReader, path: Path | str, num_bytes_without_ops: int, gaps: list[str], is_packed: bool
) -> Iterator[Event]:
    refuse_other_head(line := stream.readline(), path)
    position, num_missing = len(line), 0
    for number, line in enumerate(stream, start=2):
        position += len(line)
        if position <= num_bytes_without_ops and line.startswith(_OPS):
            continue
        try:
            event, written = parse_line(line)
            if written is not None and written != number + num_missing:
                gaps.append(describe_gap(number + num_missing, written))
                num_missing = written - number
            yield from event.each() if isinstance(event, OpsRan) and not is_packed else [event]
        except UserError as problem:
            if isinstance(problem, NotJson) and not stream.peek(1):
                gaps.append(CUT_OFF)
                return
            raise FileProblem(f"{path}, line {number}: {problem}; remove this line, and the others can be used") from None


def describe_gap(expected: int, found: int) -> str:
    """Say which lines are missing where line `found` stands in the place of line `expected`."""
    if found < expected:
        return f"line {found} is there a second time, or not in its place"
    return f"line {expected} is missing" if found == expected + 1 else f"lines {expected} to {found - 1} are missing"


def parse_line(line: bytes) -> tuple[Event, int | None]:
    """Return the event of one line of a record, and the number that the line has by itself, if it has one.

    Raises UserError if it is no event, or one of its values has another type than the event's field. `OpsRan` stays packed.
    """
    try:
        event = _decoder.decode(line)
    except ValidationError as problem:
        raise _unsound(line, problem) from None
    except (DecodeError, ValueError, RecursionError):
        raise NotJson(_NO_EVENT) from None
    number = _LINE_NUMBER.search(line, max(0, len(line) - _LONGEST_NUMBER))
    return event, int(number[1]) if number else None


def _unsound(line: bytes, problem: ValidationError) -> UserError:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):  # the wrong value stands before the damage
        return NotJson(_NO_EVENT)
    name = data.get("event") if isinstance(data, dict) else None
    return UserError(f"the event {name!r} is not whole: {problem}" if name in _NAMES else _NO_EVENT)


def refuse_other_head(line: bytes, path: Path | str) -> None:
    """Raise FileProblem unless this is the first line of a record that this release reads."""
    try:
        head = json.loads(line)
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise FileProblem(f"{path} is not a {FORMAT} file: it is corrupt or another kind of file")
    if head.get("version") != VERSION:
        raise FileProblem(f"{path} has {FORMAT} version {head.get('version')!r}, but this release reads version {VERSION}")


def num_complete_bytes(path: Path) -> int:
    """Return how many bytes of a record end with a step, a recovery or a resume: the next events may be of an unfinished one."""
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            last = content.rfind(b"\n")  # behind it is a line that was cut, if anything
            starts = [content.rfind(f'\n{{"event":"{name_of(kind)}"'.encode(), 0, last) for kind in (Stepped, Recovered, Resumed)]
            end = content.find(b"\n", max(0, *(start + 1 for start in starts)))
            return end + 1 if end >= 0 else len(content)
    except (OSError, ValueError) as problem:  # the latter if the file is empty
        raise FileProblem(f"cannot read {path}: {problem}") from None


def events_after(path: Path, num_bytes: int) -> list[Event]:
    """Return the events of a record behind its first `num_bytes` bytes, which end with a line; a cut line is left out."""
    with path.open("rb") as stream:
        stream.seek(num_bytes)
        return [event for line in stream if (event := _event_unless_cut(line)) is not None]


def _event_unless_cut(line: bytes) -> Event | None:
    try:
        return parse_line(line)[0]
    except NotJson:
        return None
