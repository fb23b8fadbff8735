"""The record of a run: its events as structures. Simulated and real runs write the same events."""

from collections.abc import Iterator
from typing import Annotated, Any

from msgspec import Meta, Struct

from recycle.core.events.op_columns import unpack_ops

# The parts of a recovery's time, in `Recovered`.
PARTS = ("detect", "abort", "plan", "regroup", "transfer", "redo")


# A number of a record: readers put them into columns of 64 bits, and add them up.
Int = Annotated[int, Meta(gt=-(2**62), lt=2**62)]


class Recordable(Struct, frozen=True, tag_field="event"):
    """An event. Its tag is its name in the record."""


def name_of(event: Recordable | type[Recordable]) -> str:
    """Return the name that events of this kind have in the record."""
    return str(event.__struct_config__.tag)


class Started(Recordable, frozen=True, tag="started"):
    """A run began; `source` is `replay`, `simulate` or `train`.

    A simulated run, which has no plan beside its record, has the numbers of pipelines, stages and micro-batches as its `shape`.
    """

    source: str
    name: str
    shape: tuple[Int, ...] = ()


class Resumed(Recordable, frozen=True, tag="resumed"):
    """The run was resumed from its checkpoint after `num_steps` steps; `at_us` is the end of the time before."""

    at_us: Int
    num_steps: Int


class OpRan(Recordable, frozen=True, tag="op"):
    """A worker ran an op (`2F0@1`), its stage's `reduce`, or its `optimizer` step.

    It was in vain if the step before it was taken back: then the iteration began again with the right weights.
    """

    iteration: Int
    worker: str
    op: str
    start_us: Int
    end_us: Int
    is_in_vain: bool = False


class OpsRan(Recordable, frozen=True, tag="ops"):
    """What a worker ran in an iteration, as packed columns from `start_us` on; readers of a record get an `OpRan` for each op.

    `num_ops` counts the ops that were not in vain. If it `is_undone`, the iteration was broken off, and all of them were in vain.
    """

    iteration: Int
    worker: str
    start_us: Int
    end_us: Int
    num_ops: Int
    ops: str
    is_undone: bool = False

    def each(self) -> Iterator[OpRan]:
        """Yield every op; raises UserError if they cannot be unpacked."""
        for label, start_us, end_us, in_vain in unpack_ops(self.ops, self.start_us):
            yield OpRan(self.iteration, self.worker, label, start_us, end_us, in_vain or self.is_undone)


class Stepped(Recordable, frozen=True, tag="step"):
    """An iteration was applied at every stage: its mean loss, the norm of its gradient, and the gradient's scale.

    A loss or norm that is not finite is None; so is the scale of a step that was skipped for it. `planned_us` is the plan's
    period at the speed at which the ops ran. `has_begun_again` says that its first ops ran in vain, and then once more. In
    float16 the loss was multiplied by `loss_scale`; norm and scale are those of the gradient without it.
    """

    iteration: Int
    at_us: Int
    loss: float | None
    norm: float | None
    scale: float | None
    planned_us: Int = 0
    num_ops: Int = 0
    has_begun_again: bool = False
    loss_scale: float = 1.0


class Evaluated(Recordable, frozen=True, tag="evaluation"):
    """The mean loss over the evaluation data with the weights after `num_steps` steps; None if it is not finite.

    It was computed from `num_microbatches` micro-batches, in `took_us`.
    """

    at_us: Int
    num_steps: Int
    loss: float | None
    num_microbatches: Int = 0
    took_us: Int = 0


class Held(Recordable, frozen=True, tag="memory"):
    """A worker's peak memory: of its process, of activations as measured, and of activations by the plan's memory model.

    `static_bytes` are those of its parameters, optimizer state and gradients, guests included, as measured;
    `planned_static_bytes` are those by the profile of the plan, 0 if it does not know them.
    """

    worker: str
    peak_bytes: Int
    activation_bytes: Int
    planned_bytes: Int
    static_bytes: Int = 0
    planned_static_bytes: Int = 0


class Saved(Recordable, frozen=True, tag="checkpoint"):
    """A complete checkpoint, after `num_steps` steps, is on disk."""

    at_us: Int
    num_steps: Int
    folder: str
    size_bytes: Int


class Warned(Recordable, frozen=True, tag="warning"):
    """Something went wrong that did not end the run, in one sentence."""

    at_us: Int
    text: str


class Changed(Recordable, frozen=True, tag="changed"):
    """A node joined or left; `num_live` is the number of live nodes after it."""

    at_us: Int
    node: str
    joins: bool
    num_live: Int


class Placed(Recordable, frozen=True, tag="placed"):
    """A process takes the place `node`; `host` is the name of its machine, `pid` its process id there."""

    at_us: Int
    node: str
    host: str
    pid: Int


class Joining(Recordable, frozen=True, tag="joining"):
    """A process is loading, and takes the place `node` at the next boundary between iterations."""

    at_us: Int
    node: str


class Suspected(Recordable, frozen=True, tag="suspected"):
    """A worker is alive but does not make progress, and is being fenced; the reason in a few words."""

    at_us: Int
    node: str
    reason: str


class SpeedChanged(Recordable, frozen=True, tag="speed"):
    """A worker has run its ops at another speed since `iteration`: at 0.6 they take 1 / 0.6 of the time of its peers' ops."""

    at_us: Int
    node: str
    speed: float
    iteration: Int


class LinkChanged(Recordable, frozen=True, tag="link"):
    """A link between two workers, such as `W1_1-W1_2`, has had another speed since `iteration`.

    A message takes `time_us` on it, and `usual_us` on other links between the same stages. The speed is the latter over the
    former, and 1 if there is no difference any more.
    """

    at_us: Int
    link: str
    speed: float
    iteration: Int
    time_us: Int
    usual_us: Int


class Recovered(Recordable, frozen=True, tag="recovery"):
    """A new epoch began because workers left or joined: `at_us` is when they left or asked to, `end_us` its first op's start.

    If it names no workers, they are the same ones with another plan.

    Every lost microsecond is in one of six parts. Five lie between the two times. `redo_us` is lost work before them: the time
    since the first of `redone_ops` ops began, as far as the remaining workers reported them; ops that began after a failure
    count as detection. If the run went back to a checkpoint, the steps after it are in both.

    Training went on with `iteration`. Moves are `W0_1>W1_2`: the worker at the first place has the second place from then on.
    If layers were transferred, `layers` has the number of layers that are each stage's own from then on. With shared layers,
    `carried` has the mean number of layers that each stage computes for a micro-batch from then on.
    """

    at_us: Int
    end_us: Int
    epoch: Int
    workers: tuple[str, ...]
    joins: bool
    cause: str
    iteration: Int
    detect_us: Int = 0
    abort_us: Int = 0
    plan_us: Int = 0
    regroup_us: Int = 0
    transfer_us: Int = 0
    redo_us: Int = 0
    redone_ops: Int = 0
    moves: tuple[str, ...] = ()
    num_live: Int = 0
    layers: tuple[Int, ...] = ()
    carried: tuple[float, ...] = ()

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


class Spell(Recordable, frozen=True, tag="spell"):
    """A stretch of time in one state: `train`, `redo` (work that was lost), `checkpoint`, `pause` or `down`.

    `samples` are the samples that it applied, `discarded` those that it computed in vain, and `busy_us` is how long a live worker
    computed in it, on average: the rest of a `train` spell is bubble.
    """

    start_us: Int
    end_us: Int
    state: str
    cause: str = ""
    samples: Int = 0
    discarded: Int = 0
    busy_us: Int = 0
    num_live: Int = 0

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
