"""The record: what happened in a run, event by event, as lines of JSON. A simulated run and a real one write the same events.

A view (a table, a picture, a trace for Perfetto) reads a record and nothing else, so that it shows either run alike.
"""

import errno
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from recycle.core.errors import FileProblem, UserError
from recycle.core.files import write_text

FORMAT, VERSION = "recycle-record", 1
# What a worker does after its ops, in the words of `OpRan`.
REDUCE, OPTIMIZER = "reduce", "optimizer"
# Where the time of a recovery goes, in the words of `Recovered`.
PARTS = ("detect", "abort", "plan", "regroup", "transfer", "redo")
# What lies in the folder of a run; `PLAN` is what it began with, and in `PLANS` are those of its later epochs.
PLAN, PLANS, RECORD, SUMMARY, CHECKPOINTS = "plan.json", "plans", "record.jsonl", "summary.json", "checkpoints"
_PLAN_FILE = re.compile(r"from-iteration-(\d{1,18})\.json")
# Why a spell was thrown away: all went back to a checkpoint.
ROLLED_BACK = "rolled back"


@dataclass(frozen=True, slots=True)
class Started:
    """A run began: from what (`replay`, `simulate` or `train`) and under which name."""

    EVENT: ClassVar[str] = "started"
    source: str
    name: str


@dataclass(frozen=True, slots=True)
class OpRan:
    """A worker ran an op (`2F0@1`), its stage's `reduce`, or its `optimizer` step.

    It was in vain if the step before it was taken back: then the iteration was begun again, with the right weights.
    """

    EVENT: ClassVar[str] = "op"
    iteration: int
    worker: str
    op: str
    start_us: int
    end_us: int
    is_in_vain: bool = False

    def __reduce__(self) -> tuple[type["OpRan"], tuple[Any, ...]]:
        """There are many of them on their way between processes, and what dataclasses do for that is slow."""
        return OpRan, (self.iteration, self.worker, self.op, self.start_us, self.end_us, self.is_in_vain)


@dataclass(frozen=True, slots=True)
class Stepped:
    """An iteration was applied at every stage: its mean loss, the norm of its gradient, and what it was scaled by.

    A loss or norm that is not finite is None; so is the scale of a step that was skipped for it. `planned_us` is what the plan
    says that the iteration takes at the speed at which its ops ran.
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
    """What a worker held at most: its process in all, activations as measured, and as the plan's memory model says."""

    EVENT: ClassVar[str] = "memory"
    worker: str
    peak_bytes: int
    activation_bytes: int
    planned_bytes: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of so many steps is on disk, whole."""

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
    """A node joined or left; `num_live` is how many are there after it."""

    EVENT: ClassVar[str] = "changed"
    at_us: int
    node: str
    joins: bool
    num_live: int


@dataclass(frozen=True, slots=True)
class Joining:
    """A process is loading, and takes the seat `node` at the next boundary between iterations."""

    EVENT: ClassVar[str] = "joining"
    at_us: int
    node: str


@dataclass(frozen=True, slots=True)
class Suspected:
    """A worker is alive but does not do its part, and is being fenced; the reason in a few words."""

    EVENT: ClassVar[str] = "suspected"
    at_us: int
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """A new epoch began because workers left, or joined: `at_us` is when they did, or asked to, `end_us` when its first op began.

    Every lost microsecond is in one of six parts; five lie between the two times, and `redo_us` is work before them that was
    thrown away: `redone_ops` ops, as far as those tell who are left, since the first of them began; those that began after a
    failure ran while it was detected. If all went back to a checkpoint, the steps behind it are in both.

    Training went on with `iteration`. Moves are `W0_1>W1_2`: whoever sat on the first seat sits on the second since.
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
        # JSON knows no tuples: what was one comes back as a list.
        for name in ("workers", "moves"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))

    @property
    def parts_us(self) -> dict[str, int]:
        """What was lost to what, in the order in which it happens; what is redone comes last."""
        return {part: getattr(self, f"{part}_us") for part in PARTS}

    @property
    def lost_us(self) -> int:
        return sum(self.parts_us.values())

    @property
    def filled(self) -> frozenset[str]:
        """The seats that somebody took: who joined, and where somebody moved to."""
        return frozenset((*(self.workers if self.joins else ()), *(move.partition(">")[2] for move in self.moves)))

    @property
    def emptied(self) -> frozenset[str]:
        """The seats where nobody is any more: of those who left, and from where somebody moved, unless they were filled."""
        left = () if self.joins else self.workers
        return frozenset((*left, *(move.partition(">")[0] for move in self.moves))) - self.filled

    def to_json(self) -> dict[str, Any]:
        """As summaries tell it: steps count from 1, and `worker` names all of them as the command line would."""
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
    """A stretch of time in one state: `train`, `redo` (work that was thrown away), `checkpoint`, `pause` or `down`.

    `samples` are those that it added for good, `discarded` those that it worked on in vain, and `busy_us` is how long a live
    worker computed in it, on average: the rest of a `train` spell is bubble.
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


Event = Started | OpRan | Stepped | Held | Saved | Warned | Changed | Joining | Suspected | Recovered | Spell
_KINDS: dict[str, type[Event]] = {
    kind.EVENT: kind for kind in (Started, OpRan, Stepped, Held, Saved, Warned, Changed, Joining, Suspected, Recovered, Spell)
}
_DEFAULTS = {name: {field.name: field.default for field in fields(kind)} for name, kind in _KINDS.items()}


def in_hindsight(spells: Iterable[Spell], course: Iterable[Stepped | Recovered]) -> list[Spell]:
    """Return the spells as they are known at the end: what trained for steps that a checkpoint threw away was work in vain.

    A record grows while a run goes on, so that it says of such steps that they were done, and later that they are done again.
    `course` is all steps and recoveries, in the order of the record.
    """
    done: list[Stepped] = []
    lost_us: set[int] = set()
    for one in course:
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
    """Where in the folder of a run the plan lies by which it went from this iteration on."""
    return f"{PLANS}/from-iteration-{iteration}.json"


def later_plans(folder: Path) -> dict[int, Path]:
    """The plans of a run's later epochs, each by the iteration from which it was gone by, in order."""
    try:
        names = [path for path in (folder / PLANS).iterdir() if _PLAN_FILE.fullmatch(path.name)]
    except OSError:
        return {}  # a run that was recorded without them, or that had one epoch
    return dict(sorted((int(path.stem.rpartition("-")[2]), path) for path in names))


def dump_event(event: Event) -> str:
    """Return the event as a line of JSON, without what is as it is by default."""
    told = {name: value for name, default in _DEFAULTS[event.EVENT].items() if (value := getattr(event, name)) != default}
    return json.dumps({"event": event.EVENT, **told}, separators=(",", ":"), ensure_ascii=False)


def write_record(path: Path | str, events: Iterable[Event]) -> None:
    """Write a whole record in one step."""
    head = json.dumps({"format": FORMAT, "version": VERSION})
    write_text(Path(path), "\n".join([head, *map(dump_event, events)]) + "\n")


class RecordWriter:
    """A record that grows while a run goes on, line by line. It begins with `events`, and replaces what was at `path`."""

    def __init__(self, path: Path, events: Iterable[Event] = ()) -> None:
        write_record(path, events)
        self._stream = path.open("ab", buffering=0)

    def write(self, *events: Event) -> None:
        """Add events, and hand them to the operating system: what was written stays if this process is killed."""
        lines = "".join(f"{dump_event(event)}\n" for event in events).encode()
        if self._stream.write(lines) != len(lines):
            raise OSError(errno.ENOSPC, "No space left for the whole line")

    def close(self) -> None:
        self._stream.close()


def read_record(path: Path | str) -> Iterator[Event]:
    """Yield the events of a record; a last line that was cut short, because its writer died, is left out."""
    try:
        # Bytes, because a line may be cut in the middle of a letter; not splitlines, which also breaks at letters inside a text.
        lines = Path(path).read_bytes().removesuffix(b"\n").split(b"\n")
    except OSError as problem:
        raise FileProblem(f"cannot read {path}: {problem.strerror or problem}") from None
    if (head := _parsed(lines[0])) is None or head.get("format") != FORMAT:
        raise FileProblem(f"{path} is not a {FORMAT} file: it is corrupt or another kind of file")
    if head.get("version") != VERSION:
        raise FileProblem(f"{path} has {FORMAT} version {head.get('version')!r}, but this release reads version {VERSION}")
    for number, line in enumerate(lines[1:], start=2):
        data = _parsed(line)
        if data is None and number == len(lines):
            return
        try:
            yield _event(data)
        except UserError as problem:
            raise FileProblem(f"{path}, line {number}: {problem}") from None


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _event(data: dict[str, Any] | None) -> Event:
    kind = _KINDS.get(str(data.get("event"))) if data is not None else None
    if data is None or kind is None:
        raise UserError("this is not an event of a record")
    known = {field.name for field in fields(kind)}
    try:
        return kind(**{key: value for key, value in data.items() if key in known})
    except TypeError as problem:
        raise UserError(f"the event {kind.EVENT!r} is not whole: {problem}") from None
