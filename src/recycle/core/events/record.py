"""The record of a run: its events as dataclasses, and as lines of JSON. Simulated and real runs write the same events."""

import errno
import json
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, ClassVar, get_args

from recycle.core.errors import FileProblem, UserError
from recycle.core.files import refuse_device, write_text

FORMAT, VERSION = "recycle-record", 1
# The `op` of an `OpRan` that is no op of the row.
REDUCE, OPTIMIZER = "reduce", "optimizer"
# The parts of a recovery's time, in `Recovered`.
PARTS = ("detect", "abort", "plan", "regroup", "transfer", "redo")
# The names in a run folder; `PLAN` is the plan of the first epoch, and the folder `PLANS` has those of later epochs.
PLAN, PLANS, RECORD, SUMMARY, CHECKPOINTS = "plan.json", "plans", "record.jsonl", "summary.json", "checkpoints"
_PLAN_FILE = re.compile(r"from-iteration-(\d{1,18})\.json")
# The cause of a spell whose work was lost: the run went back to a checkpoint.
ROLLED_BACK = "rolled back"


@dataclass(frozen=True, slots=True)
class Started:
    """A run began; `source` is `replay`, `simulate` or `train`."""

    EVENT: ClassVar[str] = "started"
    source: str
    name: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """The run was resumed from its checkpoint after `num_steps` steps; `at_us` is the end of the time before."""

    EVENT: ClassVar[str] = "resumed"
    at_us: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class OpRan:
    """A worker ran an op (`2F0@1`), its stage's `reduce`, or its `optimizer` step.

    It was in vain if the step before it was taken back: then the iteration began again with the right weights.
    """

    EVENT: ClassVar[str] = "op"
    iteration: int
    worker: str
    op: str
    start_us: int
    end_us: int
    is_in_vain: bool = False

    def __reduce__(self) -> tuple[type["OpRan"], tuple[Any, ...]]:
        """Pickle faster than dataclasses do by default: workers send many of these events."""
        return OpRan, (self.iteration, self.worker, self.op, self.start_us, self.end_us, self.is_in_vain)


@dataclass(frozen=True, slots=True)
class Stepped:
    """An iteration was applied at every stage: its mean loss, the norm of its gradient, and the gradient's scale.

    A loss or norm that is not finite is None; so is the scale of a step that was skipped for it. `planned_us` is the plan's
    period at the speed at which the ops ran.
    """

    EVENT: ClassVar[str] = "step"
    iteration: int
    at_us: int
    loss: float | None
    norm: float | None
    scale: float | None
    planned_us: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """A worker's peak memory: of its process, of activations as measured, and of activations by the plan's memory model."""

    EVENT: ClassVar[str] = "memory"
    worker: str
    peak_bytes: int
    activation_bytes: int
    planned_bytes: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint, after `num_steps` steps, is on disk."""

    EVENT: ClassVar[str] = "checkpoint"
    at_us: int
    num_steps: int
    folder: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Warned:
    """Something went wrong that did not end the run, in one sentence."""

    EVENT: ClassVar[str] = "warning"
    at_us: int
    text: str


@dataclass(frozen=True, slots=True)
class Changed:
    """A node joined or left; `num_live` is the number of live nodes after it."""

    EVENT: ClassVar[str] = "changed"
    at_us: int
    node: str
    joins: bool
    num_live: int


@dataclass(frozen=True, slots=True)
class Joining:
    """A process is loading, and takes the place `node` at the next boundary between iterations."""

    EVENT: ClassVar[str] = "joining"
    at_us: int
    node: str


@dataclass(frozen=True, slots=True)
class Suspected:
    """A worker is alive but does not make progress, and is being fenced; the reason in a few words."""

    EVENT: ClassVar[str] = "suspected"
    at_us: int
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """A new epoch began because workers left or joined: `at_us` is when they left or asked to, `end_us` its first op's start.

    Every lost microsecond is in one of six parts. Five lie between the two times. `redo_us` is lost work before them: the time
    since the first of `redone_ops` ops began, as far as the remaining workers reported them; ops that began after a failure
    count as detection. If the run went back to a checkpoint, the steps after it are in both.

    Training went on with `iteration`. Moves are `W0_1>W1_2`: the worker at the first place has the second place from then on.
    """

    EVENT: ClassVar[str] = "recovery"
    at_us: int
    end_us: int
    epoch: int
    workers: tuple[str, ...]
    joins: bool
    cause: str
    iteration: int
    detect_us: int = 0
    abort_us: int = 0
    plan_us: int = 0
    regroup_us: int = 0
    transfer_us: int = 0
    redo_us: int = 0
    redone_ops: int = 0
    moves: tuple[str, ...] = ()
    num_live: int = 0

    def __post_init__(self) -> None:
        # JSON has no tuples: they are read back as lists.
        for name in ("workers", "moves"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))

    @property
    def parts_us(self) -> dict[str, int]:
        """The lost time by part, in order of time; redone work comes last."""
        return {part: getattr(self, f"{part}_us") for part in PARTS}

    @property
    def lost_us(self) -> int:
        return sum(self.parts_us.values())

    @property
    def filled(self) -> frozenset[str]:
        """The places that were taken: of workers that joined, and the new places of workers that moved."""
        return frozenset((*(self.workers if self.joins else ()), *(move.partition(">")[2] for move in self.moves)))

    @property
    def emptied(self) -> frozenset[str]:
        """The places that became empty: of workers that left, and the old places of workers that moved, unless taken again."""
        left = () if self.joins else self.workers
        return frozenset((*left, *(move.partition(">")[0] for move in self.moves))) - self.filled

    def to_json(self) -> dict[str, Any]:
        """Return the form of summaries: steps count from 1, and `worker` names all workers as on the command line."""
        return {
            "worker": ",".join(self.workers),
            "workers": list(self.workers),
            "joins": self.joins,
            "cause": self.cause,
            "step": self.iteration + 1,
            "epoch": self.epoch,
            "at_us": self.at_us,
            "lost_us": self.lost_us,
            **{f"{part}_us": time_us for part, time_us in self.parts_us.items()},
            "redone_ops": self.redone_ops,
            "moves": list(self.moves),
            "num_live": self.num_live,
        }


@dataclass(frozen=True, slots=True)
class Spell:
    """A stretch of time in one state: `train`, `redo` (work that was lost), `checkpoint`, `pause` or `down`.

    `samples` are the samples that it applied, `discarded` those that it computed in vain, and `busy_us` is how long a live worker
    computed in it, on average: the rest of a `train` spell is bubble.
    """

    EVENT: ClassVar[str] = "spell"
    start_us: int
    end_us: int
    state: str
    cause: str = ""
    samples: int = 0
    discarded: int = 0
    busy_us: int = 0
    num_live: int = 0

    @property
    def length_us(self) -> int:
        return self.end_us - self.start_us


Event = Started | Resumed | OpRan | Stepped | Held | Saved | Warned | Changed | Joining | Suspected | Recovered | Spell
_KINDS: dict[str, type[Event]] = {kind.EVENT: kind for kind in get_args(Event)}
# One encoder for all lines: `json.dumps` with these options would make one for each.
_OP = f'{{"event":"{OpRan.EVENT}"'.encode()
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
_DEFAULTS = {name: {field.name: field.default for field in fields(kind)} for name, kind in _KINDS.items()}


def in_hindsight(spells: Iterable[Spell], progress: Iterable[Stepped | Recovered]) -> list[Spell]:
    """Return the spells as they are known at the end: a `train` spell of steps that a rollback lost becomes `redo`.

    A record grows during the run, so that it has such steps twice: done, and later done again. `progress` is all steps and
    recoveries, in the order of the record.
    """
    done: list[Stepped] = []
    lost_us: set[int] = set()
    for one in progress:
        while done and done[-1].iteration >= one.iteration:
            lost_us.add(done.pop().at_us)
        if isinstance(one, Stepped):
            done.append(one)
    return [
        replace(spell, state="redo", cause=ROLLED_BACK, samples=0, discarded=spell.samples)
        if spell.state == "train" and spell.end_us in lost_us
        else spell
        for spell in spells
    ]


def plan_file(iteration: int) -> str:
    """Return the file, in a run folder, of the plan that the run followed from this iteration on."""
    return f"{PLANS}/from-iteration-{iteration}.json"


def later_plans(folder: Path) -> dict[int, Path]:
    """Return the plan files of a run's later epochs by their first iteration, in order."""
    # There is no such folder if a run was recorded without them, or had one epoch.
    paths = (path for path in (folder / PLANS).glob("*.json") if _PLAN_FILE.fullmatch(path.name))
    return dict(sorted((int(path.stem.rpartition("-")[2]), path) for path in paths))


def dump_event(event: Event) -> str:
    """Return the event as a line of JSON, without fields that have their default."""
    written = {name: value for name, default in _DEFAULTS[event.EVENT].items() if (value := getattr(event, name)) != default}
    return _encode({"event": event.EVENT, **written})


def write_record(path: Path | str, events: Iterable[Event]) -> None:
    """Write a whole record in one step."""
    head = json.dumps({"format": FORMAT, "version": VERSION})
    write_text(Path(path), "\n".join([head, *map(dump_event, events)]) + "\n")


class RecordWriter:
    """A record that grows while a run goes on, line by line. It begins with `events`, and replaces the file at `path`.

    With None for `events` it adds to the file.
    """

    def __init__(self, path: Path, events: Iterable[Event] | None = ()) -> None:
        if events is not None:
            write_record(path, events)
        self._stream = path.open("ab", buffering=0)
        self._unwritten = bytearray()

    @property
    def num_unwritten_bytes(self) -> int:
        return len(self._unwritten)

    def write(self, *events: Event) -> None:
        """Add events, and hand them to the operating system: they stay if this process is killed.

        After an error, they stay in memory, and the next call tries again.
        """
        self._unwritten += "".join(f"{dump_event(event)}\n" for event in events).encode()
        del self._unwritten[: self._stream.write(self._unwritten)]
        if self._unwritten:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._stream.close()


def read_record(path: Path | str, num_bytes_without_ops: int = 0) -> Iterator[Event]:
    """Yield the events of a record; a last line that was cut short, because its writer died, is left out.

    Ops in the first `num_bytes_without_ops` bytes are left out, too: they are most of a record, and reading it is faster so.
    """
    refuse_device(Path(path))
    try:
        with Path(path).open("rb") as stream:  # bytes, because a line may be cut inside a character
            yield from _read_events(stream, path, num_bytes_without_ops)
    except OSError as problem:
        raise FileProblem(f"cannot read {path}: {problem.strerror or problem}") from None


def _read_events(stream: BufferedReader, path: Path | str, num_bytes_without_ops: int) -> Iterator[Event]:
    head = _parsed(line := stream.readline())
    if head is None or head.get("format") != FORMAT:
        raise FileProblem(f"{path} is not a {FORMAT} file: it is corrupt or another kind of file")
    if head.get("version") != VERSION:
        raise FileProblem(f"{path} has {FORMAT} version {head.get('version')!r}, but this release reads version {VERSION}")
    position = len(line)
    for number, line in enumerate(stream, start=2):
        position += len(line)
        if position <= num_bytes_without_ops and line.startswith(_OP):
            continue
        data = _parsed(line)
        if data is None and not stream.peek(1):
            return
        try:
            yield _event(data)
        except UserError as problem:
            raise FileProblem(f"{path}, line {number}: {problem}") from None


def num_complete_bytes(path: Path) -> int:
    """Return how many bytes of a record end with a step, a recovery or a resume: the next events may be of an unfinished one."""
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            last = content.rfind(b"\n")  # behind it is a line that was cut, if anything
            starts = [content.rfind(f'\n{{"event":"{kind.EVENT}"'.encode(), 0, last) for kind in (Stepped, Recovered, Resumed)]
            end = content.find(b"\n", max(0, *(start + 1 for start in starts)))
            return end + 1 if end >= 0 else len(content)
    except (OSError, ValueError) as problem:  # the latter if the file is empty
        raise FileProblem(f"cannot read {path}: {problem}") from None


def events_after(path: Path, num_bytes: int) -> list[Event]:
    """Return the events of a record behind its first `num_bytes` bytes, which end with a line; a cut line is left out."""
    with path.open("rb") as stream:
        stream.seek(num_bytes)
        return [_event(data) for line in stream if (data := _parsed(line)) is not None]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _event(data: dict[str, Any] | None) -> Event:
    name = str(data.pop("event", "")) if data is not None else ""
    if data is None or name not in _KINDS:
        raise UserError("this is not an event of a record")
    kind, known = _KINDS[name], _DEFAULTS[name]
    if not data.keys() <= known.keys():  # of a later release
        data = {key: value for key, value in data.items() if key in known}
    try:
        return kind(**data)
    except TypeError as problem:
        raise UserError(f"the event {kind.EVENT!r} is not whole: {problem}") from None
