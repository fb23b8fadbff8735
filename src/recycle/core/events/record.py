"""The record of a run: its events as dataclasses. Simulated and real runs write the same events."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from recycle.core.events.op_columns import unpack_ops

# The parts of a recovery's time, in `Recovered`.
PARTS = ("detect", "abort", "plan", "regroup", "transfer", "redo")


def _make_tuples(event: object, *names: str) -> None:
    """JSON has no tuples: they are read back as lists."""
    for name in names:
        if isinstance(value := getattr(event, name), list):
            object.__setattr__(event, name, tuple(value))


@dataclass(frozen=True, slots=True)
class Started:
    """A run began; `source` is `replay`, `simulate` or `train`.

    A simulated run, which has no plan beside its record, has the numbers of pipelines, stages and micro-batches as its `shape`.
    """

    EVENT: ClassVar[str] = "started"
    source: str
    name: str
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _make_tuples(self, "shape")


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
class OpsRan:
    """What a worker ran in an iteration, as packed columns from `start_us` on; readers of a record get an `OpRan` for each op.

    `num_ops` counts the ops that were not in vain. If it `is_undone`, the iteration was broken off, and all of them were in vain.
    """

    EVENT: ClassVar[str] = "ops"
    iteration: int
    worker: str
    start_us: int
    end_us: int
    num_ops: int
    ops: str
    is_undone: bool = False

    def each(self) -> Iterator[OpRan]:
        """Yield every op; raises UserError if they cannot be unpacked."""
        for label, start_us, end_us, in_vain in unpack_ops(self.ops, self.start_us):
            yield OpRan(self.iteration, self.worker, label, start_us, end_us, in_vain or self.is_undone)


@dataclass(frozen=True, slots=True)
class Stepped:
    """An iteration was applied at every stage: its mean loss, the norm of its gradient, and the gradient's scale.

    A loss or norm that is not finite is None; so is the scale of a step that was skipped for it. `planned_us` is the plan's
    period at the speed at which the ops ran. `has_begun_again` says that its first ops ran in vain, and then once more. In
    float16 the loss was multiplied by `loss_scale`; norm and scale are those of the gradient without it.
    """

    EVENT: ClassVar[str] = "step"
    iteration: int
    at_us: int
    loss: float | None
    norm: float | None
    scale: float | None
    planned_us: int = 0
    num_ops: int = 0
    has_begun_again: bool = False
    loss_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The mean loss over the evaluation data with the weights after `num_steps` steps; None if it is not finite.

    It was computed from `num_microbatches` micro-batches, in `took_us`.
    """

    EVENT: ClassVar[str] = "evaluation"
    at_us: int
    num_steps: int
    loss: float | None
    num_microbatches: int = 0
    took_us: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """A worker's peak memory: of its process, of activations as measured, and of activations by the plan's memory model.

    `static_bytes` are those of its parameters, optimizer state and gradients, guests included, as measured;
    `planned_static_bytes` are those by the profile of the plan, 0 if it does not know them.
    """

    EVENT: ClassVar[str] = "memory"
    worker: str
    peak_bytes: int
    activation_bytes: int
    planned_bytes: int
    static_bytes: int = 0
    planned_static_bytes: int = 0


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
class Placed:
    """A process takes the place `node`; `host` is the name of its machine, `pid` its process id there."""

    EVENT: ClassVar[str] = "placed"
    at_us: int
    node: str
    host: str
    pid: int


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
class SpeedChanged:
    """A worker has run its ops at another speed since `iteration`: at 0.6 they take 1 / 0.6 of the time of its peers' ops."""

    EVENT: ClassVar[str] = "speed"
    at_us: int
    node: str
    speed: float
    iteration: int


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """A link between two workers, such as `W1_1-W1_2`, has had another speed since `iteration`.

    A message takes `time_us` on it, and `usual_us` on other links between the same stages. The speed is the latter over the
    former, and 1 if there is no difference any more.
    """

    EVENT: ClassVar[str] = "link"
    at_us: int
    link: str
    speed: float
    iteration: int
    time_us: int
    usual_us: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """A new epoch began because workers left or joined: `at_us` is when they left or asked to, `end_us` its first op's start.

    If it names no workers, they are the same ones with another plan.

    Every lost microsecond is in one of six parts. Five lie between the two times. `redo_us` is lost work before them: the time
    since the first of `redone_ops` ops began, as far as the remaining workers reported them; ops that began after a failure
    count as detection. If the run went back to a checkpoint, the steps after it are in both.

    Training went on with `iteration`. Moves are `W0_1>W1_2`: the worker at the first place has the second place from then on.
    If layers were transferred, `layers` has the number of layers that are each stage's own from then on. With shared layers,
    `carried` has the mean number of layers that each stage computes for a micro-batch from then on.
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
    layers: tuple[int, ...] = ()
    carried: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _make_tuples(self, "workers", "moves", "layers", "carried")

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


Event = (
    Started
    | Resumed
    | OpRan
    | OpsRan
    | Stepped
    | Evaluated
    | Held
    | Saved
    | Warned
    | Changed
    | Placed
    | Joining
    | Suspected
    | SpeedChanged
    | LinkChanged
    | Recovered
    | Spell
)
