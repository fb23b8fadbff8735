"""The messages between coordinator and workers, and their JSON form. A message is plain data: reading one executes nothing.

A worker sends a `Hello`, receives `Welcome` or `Refused`, loads the job, says that it is `Ready`, and then waits for a
`StartEpoch`, which gives it a place in an epoch.
`StopEpoch` ends an epoch at once, `PauseAtBoundary` at the next iteration boundary. The worker answers both with `EpochStopped`,
which reports its progress.
"""

import builtins
import json
import re
from dataclasses import dataclass, field, fields
from reprlib import repr as shortened
from types import UnionType
from typing import Any, get_args, get_origin


class ProtocolError(Exception):
    """The bytes from a connection are not a message of this release."""


@dataclass(frozen=True, slots=True)
class Challenge:
    """The coordinator's first message: a nonce, from which and the job's token the keys of the connection are derived."""

    nonce: str
    release: str


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker asks to join, if possible at `preferred_place`. `member` and `epoch` are its former ones if it reconnects.

    A connection with another `purpose` than membership makes no member; it ends when its purpose is served.
    """

    release: str
    job: str
    host: str
    pid: int
    nonce: str
    clock_us: int = 0
    preferred_place: str = ""
    member: int = -1
    epoch: int = -1
    purpose: str = ""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The worker is a member, and counts as dead if it is silent for `lease_s`. `about` describes the job.

    `term` is that of the coordinator: a worker that has seen a higher one disconnects.
    """

    member: int
    lease_s: float
    job: str
    about: dict[str, Any] = field(default_factory=dict)
    term: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker cannot join, and why. If `may_retry`, another process on its machine could join.

    If it `tries_again`, the same process can, here or at another coordinator: it is not certain that this one leads.
    """

    reason: str
    may_retry: bool = False
    tries_again: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """A connection with a purpose of its own is served later, and why. It comes again about once a second, before the welcome."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ballot:
    """The sum of squares of every stage's reduced gradient, in parts: the input of the verdict on a step."""

    iteration: int
    norms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """The progress of a worker when it stops.

    Its weights have `num_steps` steps. If `own` is given, the worker holds the reduced gradient of that iteration without its
    verdict: `own` is the worker's part of the ballot, `ABSENT` at other stages. `whole` is the last complete ballot it received.
    """

    num_steps: int
    own: Ballot | None = None
    whole: Ballot | None = None

    @property
    def num_reduced(self) -> int:
        """The number of iterations that are applied here, or whose reduced gradient is held here."""
        return self.own.iteration + 1 if self.own is not None else self.num_steps


@dataclass(frozen=True, slots=True)
class LayerTransfer:
    """At the start of an epoch, the member at one place sends the state of the layers from `first` to before `end` to another."""

    receiver: str
    sender: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class StartEpoch:
    """A new epoch for the member at `place`: its row `program` as JSON, and the first iteration. Nobody is at the `dead` places.

    `ballot` settles the iteration before it for members without its verdict. `sources` maps each place of this stage without the
    stage's state to the place that it copies from; `checkpoint` is the number of steps of the checkpoint to load, -1 for none.
    `only_saves` says that the epoch does no step, and only writes a checkpoint, because the job stops, or because members leave
    whose state no other member holds. `origin` is the last epoch, up to this one, in
    which all began anew or from a checkpoint: a state of an earlier origin is not mixed with the others. Workers report every op
    of the first iteration, and of each one whose number is a multiple of `ops_every`. `term` is that of the coordinator: a worker
    that has seen a higher one does not obey.

    `layer_counts` says how many layers of the model are each stage's own, if that may differ from the job's own stages. If
    `transfers_layers`, members do not hold exactly the layers of their places: each keeps those that it has, and all receive the
    others by `transfers`, of which a member gets those that it takes part in.
    """

    epoch: int
    place: str
    dead: tuple[str, ...]
    program: str
    iteration: int
    ballot: Ballot | None = None
    sources: dict[str, str] = field(default_factory=dict)
    checkpoint: int = -1
    only_saves: bool = False
    origin: int = 1
    ops_every: int = 1
    term: int = 0
    layer_counts: tuple[int, ...] = ()
    transfers_layers: bool = False
    transfers: tuple[LayerTransfer, ...] = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker has loaded the job, and can take a place now; nobody has to wait while it loads."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """A worker was asked to stop: it wants to leave the job at the next iteration boundary. The answer is `JobEnded`."""


@dataclass(frozen=True, slots=True)
class StopEpoch:
    """The epoch ends now: abort, and report the progress."""

    epoch: int


@dataclass(frozen=True, slots=True)
class PauseAtBoundary:
    """The epoch ends at the next iteration boundary that all agree on."""

    epoch: int


@dataclass(frozen=True, slots=True)
class EpochStopped:
    """A worker has left an epoch. `progress` is None if it does not hold the state of a stage yet.

    `stage` is the stage whose state it holds, `origin` that of the state. A worker that never received its last place holds the
    state of the place before. `unreachable` names the workers to which it could not connect. `layers` are the layers of the model
    whose state it holds, if layers may move: after a transfer that was broken off, those before and those after it.
    """

    epoch: int
    progress: ProgressReport | None
    reason: str = ""
    stage: int = -1
    origin: int = 1
    unreachable: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EpochBegun:
    """A worker is about to run its first op of an epoch, after it copied a stage's state for `transfer_us`."""

    epoch: int
    transfer_us: int


# What a worker may be doing, beside ops and the parts of a step: set up an epoch, save a checkpoint, finish, read data.
SET_UP, SAVE, FINISH, READ = "set up", "save", "finish", "read data"


@dataclass(frozen=True, slots=True)
class RenewLease:
    """A heartbeat: the iteration, what the worker is doing, and for how long it has been computing that (0 if it waits).

    A worker that waits says for which others, and for how long.
    """

    iteration: int = 0
    busy_us: int = 0
    doing: str = ""
    waits_for: str = ""
    waited_us: int = 0


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """A worker waits for entries of the rendezvous store of its epoch: each is sent as soon as it is there."""

    epoch: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """An entry of the rendezvous store of an epoch: from the worker that sets it, and to those that have asked for it."""

    epoch: int
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class Report:
    """A worker report for the ledger. A client sends it again, under the same number, until an `Ack` covers that number.

    `origin` is that of the worker's epoch: what was done before all went back, or began anew, does not count any more.
    """

    number: int
    body: dict[str, Any]
    origin: int = 0


@dataclass(frozen=True, slots=True)
class Ack:
    """All reports up to this number are in the ledger for good."""

    number: int


ALIVE = Ack(0)
"""The answer to a heartbeat: it acknowledges no report, and says that the coordinator is there."""


@dataclass(frozen=True, slots=True)
class UploadFile:
    """A request to store a file in the run folder. A first `FileContent` permits the bytes, a second one confirms them."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class DownloadFile:
    """A request for a file of the run folder. The answer is a `FileContent` and the bytes."""

    name: str


@dataclass(frozen=True, slots=True)
class FileContent:
    """Size and digest of a file in the run folder, or the problem with it."""

    size_bytes: int = 0
    sha256: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job is over, or is over for this worker, which asked to leave or `is_left_out`: the worker process ends."""

    reason: str
    is_left_out: bool = False


_Handshake = Challenge | Hello | Welcome | Refused | Waiting
_Epoch = StartEpoch | StopEpoch | PauseAtBoundary | Ready | Leaving | EpochStopped | EpochBegun | StoreEntry | StoreRequest
_FileTransfer = UploadFile | DownloadFile | FileContent
ControlMessage = _Handshake | _Epoch | RenewLease | Report | Ack | _FileTransfer | JobEnded


def wire_name(kind: type) -> str:
    """Return the `type` of a message on the wire: `UploadFile` is `upload_file`."""
    return re.sub(r"\B[A-Z]", r"_\g<0>", kind.__name__).lower()


_KINDS: dict[str, type[ControlMessage]] = {wire_name(kind): kind for kind in get_args(ControlMessage)}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_FIELDS = {
    kind: tuple((each.name, each.type) for each in fields(kind)) for kind in (*_NAMES, Ballot, ProgressReport, LayerTransfer)
}
_encode = json.JSONEncoder(
    separators=(",", ":"), default=lambda part: {name: getattr(part, name) for name, _ in _FIELDS[type(part)]}
).encode


def dumps(message: ControlMessage) -> bytes:
    kind = type(message)
    return _encode({"type": _NAMES[kind], **{name: getattr(message, name) for name, _ in _FIELDS[kind]}}).encode()


def loads(body: bytes) -> ControlMessage:
    """Return the message in `body`. Raises ProtocolError for anything else, because the sender may be hostile."""
    try:
        values = json.loads(body.decode())
        kind = _KINDS[values["type"]]
        message: ControlMessage = _read(kind, values)
        return message
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as problem:
        raise ProtocolError(f"this is no message: {type(problem).__name__} {shortened(str(problem))}") from None


def _read(kind: Any, value: Any) -> Any:
    """Convert a JSON value to the declared type of its field. Raises TypeError if the value has another type."""
    if type(value) is kind:
        return value
    if (declared := _FIELDS.get(kind)) is not None:
        found = {}
        for name, of in declared:
            if name in value:
                part = value[name]
                found[name] = part if type(part) is of else _read(of, part)
        return kind(**found)
    if isinstance(kind, UnionType):  # every union here is "X | None"
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
