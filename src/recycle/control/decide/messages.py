"""What coordinator and workers say to each other. Messages are plain data: JSON, never anything that is executed.

A worker sends a `Hello`, receives `Welcome` or `Refused`, and then waits for a `StartEpoch`, which gives it a place in an epoch.
`StopEpoch` ends an epoch at once, `PauseAtBoundary` at the next iteration boundary. The worker answers both with `EpochStopped`,
which reports its progress.
"""

import builtins
import json
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from reprlib import repr as shortened
from types import UnionType
from typing import Any, ClassVar, get_args, get_origin


class ProtocolError(Exception):
    """Something came over a connection that no coordinator or worker of this release says."""


@dataclass(frozen=True, slots=True)
class Challenge:
    """The coordinator's first word: what a worker puts its token together with to prove that it has it."""

    TYPE: ClassVar[str] = "challenge"
    nonce: str
    release: str


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker asks to take part. `seat` is the one it would like, `member` and `epoch` are what it was if it was here before.

    With an `errand` it does not: the connection is for that alone, and over when it is done.
    """

    TYPE: ClassVar[str] = "hello"
    proof: str
    release: str
    job: str
    host: str
    pid: int
    nonce: str
    clock_us: int = 0
    seat: str = ""
    member: int = -1
    epoch: int = -1
    errand: str = ""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The worker is a member, and counts as dead if it is silent for `lease_s`. `about` is what it is to train."""

    TYPE: ClassVar[str] = "welcome"
    proof: str
    member: int
    lease_s: float
    job: str
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker cannot take part, and why."""

    TYPE: ClassVar[str] = "refused"
    reason: str


@dataclass(frozen=True, slots=True)
class Ballot:
    """What is known of a step when every stage has its gradient: each stage's sum of squares."""

    iteration: int
    norms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """Where a worker stands when it stops.

    Its weights have `num_steps` steps. If `own` is there, it holds the reduced gradient of that iteration, of which no verdict
    has been heard: its own part of the ballot, `ABSENT` where others speak. `whole` is the last ballot of which it heard all.
    """

    num_steps: int
    own: Ballot | None = None
    whole: Ballot | None = None

    @property
    def num_reduced(self) -> int:
        """How many iterations it holds all of: applied, or with everything that is needed to apply them."""
        return self.own.iteration + 1 if self.own is not None else self.num_steps


@dataclass(frozen=True, slots=True)
class StartEpoch:
    """A new epoch: who sits where (`seats`, from seat to member), by which plan, from which iteration.

    `ballot` settles the iteration before it for those who have not heard its verdict. `sources` tells from which seat a seat
    copies its stage's state; `checkpoint` is after how many steps a checkpoint was made that all load, -1 if none do.
    """

    TYPE: ClassVar[str] = "go"
    epoch: int
    plan: str
    seats: dict[str, int]
    iteration: int
    ballot: Ballot | None = None
    sources: dict[str, str] = field(default_factory=dict)
    checkpoint: int = -1


@dataclass(frozen=True, slots=True)
class StopEpoch:
    """The epoch ends now: abort, and say where you stand."""

    TYPE: ClassVar[str] = "stop"
    epoch: int


@dataclass(frozen=True, slots=True)
class PauseAtBoundary:
    """The epoch is to end at the next iteration boundary that all agree on."""

    TYPE: ClassVar[str] = "pause"
    epoch: int


@dataclass(frozen=True, slots=True)
class EpochStopped:
    """A worker has left an epoch: where it stands, and why.

    A worker that has not got the state of its stage yet stands nowhere.
    """

    TYPE: ClassVar[str] = "stopped"
    epoch: int
    standing: ProgressReport | None
    reason: str = ""
    stage: int = -1
    """Of which stage it holds the state: one that never heard of its last seat still has that of the one before."""


@dataclass(frozen=True, slots=True)
class EpochBegun:
    """A worker is about to run its first op of an epoch, and how long it has copied a stage's state before."""

    TYPE: ClassVar[str] = "begun"
    epoch: int
    transfer_us: int


@dataclass(frozen=True, slots=True)
class RenewLease:
    """A sign of life: the iteration, and for how long its present op has been computing (0 if it waits for others)."""

    TYPE: ClassVar[str] = "renew"
    iteration: int = 0
    busy_us: int = 0


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """Something that all of an epoch's workers must know to find each other."""

    TYPE: ClassVar[str] = "share"
    epoch: int
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class Report:
    """Something for the books, numbered, so that it can be told again until it was heard."""

    TYPE: ClassVar[str] = "tell"
    number: int
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ack:
    """Everything that was told up to this number is in the books."""

    TYPE: ClassVar[str] = "heard"
    number: int


@dataclass(frozen=True, slots=True)
class UploadFile:
    """A file for the run's folder. The bytes follow a `FileContent` that permits them; a second one confirms them."""

    TYPE: ClassVar[str] = "bring"
    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class DownloadFile:
    """A file of the run's folder is wanted. The answer is a `FileContent`, and its bytes."""

    TYPE: ClassVar[str] = "fetch"
    name: str


@dataclass(frozen=True, slots=True)
class FileContent:
    """A file as it lies in the run's folder, or why it does not."""

    TYPE: ClassVar[str] = "file"
    size_bytes: int = 0
    sha256: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class JobEnded:
    """There is nothing more to do here."""

    TYPE: ClassVar[str] = "end"
    reason: str


ControlMessage = (
    Challenge
    | Hello
    | Welcome
    | Refused
    | StartEpoch
    | StopEpoch
    | PauseAtBoundary
    | EpochStopped
    | EpochBegun
    | RenewLease
    | StoreEntry
    | Report
    | Ack
    | UploadFile
    | DownloadFile
    | FileContent
    | JobEnded
)
_TYPES: dict[str, type[ControlMessage]] = {kind.TYPE: kind for kind in get_args(ControlMessage)}


def dumps(message: ControlMessage) -> bytes:
    """The message as JSON."""
    return json.dumps({"type": message.TYPE, **asdict(message)}, separators=(",", ":")).encode()


def loads(body: bytes) -> ControlMessage:
    """The message that was sent; anything else is a ProtocolError, for whoever sends it may mean us no good."""
    try:
        told = json.loads(body)
        kind = _TYPES[told.pop("type")]
        message: ControlMessage = _read(kind, told)
        return message
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as problem:
        raise ProtocolError(f"this is no message: {type(problem).__name__} {shortened(str(problem))}") from None


def _read(kind: Any, value: Any) -> Any:
    """What JSON has for a field of this type; raises if it is of another one."""
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**{each.name: _read(each.type, value[each.name]) for each in fields(kind) if each.name in value})
    if isinstance(kind, UnionType):  # something, or nothing
        return None if value is None else _read(get_args(kind)[0], value)
    match get_origin(kind):
        case builtins.tuple:
            return tuple(_read(get_args(kind)[0], part) for part in value)
        case builtins.dict:
            of = get_args(kind)[1]
            return {name: part if of is Any else _read(of, part) for name, part in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError(f"{shortened(value)} is no {kind.__name__}")
    return value
