"""The variants that `recycle bench cluster` compares: schedules with and without dead workers, each as data."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from recycle.core.cluster import Shape, Worker
from recycle.core.errors import UserError
from recycle.evaluate.hardware.setup import ELASTIC, Setup
from recycle.evaluate.hardware.torch_contender import TORCH_1F1B, TORCH_ZBV, TORCH_ZERO_BUBBLE

ONE_F_ONE_B, FAULT_FREE = "1f1b", "all"
ADAPTIVE, DECOUPLED, STAGGERED = "adaptive", "decoupled", "staggered"
DROPPED = "dropped"
REROUTED, CUT, SLOW_CUT = "rerouted", "cut", "slow-cut"
SHARED, SLOW = 2, 0.6
_ALL = "adaptive,decoupled,staggered"


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the results. Empty techniques mean a schedule of torch; the techniques `none` mean 1F1B.

    `dropped` is a pipeline that is left out: the other pipelines run its micro-batches besides their own. `layers` are the
    numbers of layers of the stages, if whole layers are moved. `slow` are workers with their speeds, such as W1_2=0.6, and
    `knows_speeds` says whether the plan is made for them.
    """

    name: str
    title: str
    techniques: str = ""
    dead: str = ""
    dropped: int | None = None
    shared_layers: int = 0
    layers: tuple[int, ...] = ()
    slow: str = ""
    knows_speeds: bool = False

    @property
    def is_torch(self) -> bool:
        return not self.techniques

    @property
    def failed(self) -> frozenset[Worker]:
        """The dead workers of its plan; none if their whole pipeline is dropped."""
        return frozenset(map(Worker.parse, self.dead.split(","))) if self.dead and self.dropped is None else frozenset()

    @property
    def speeds(self) -> tuple[tuple[Worker, float], ...]:
        """The workers that are slowed, each with its speed."""
        pairs = (pair.split("=") for pair in self.slow.split(",") if pair)
        return tuple((Worker.parse(name), float(speed)) for name, speed in pairs)

    def pipelines(self, setup: Setup) -> Sequence[int]:
        """The pipelines of the cluster that take part, in the order of the pipelines of its plan."""
        return [number for number in range(setup.pipelines) if number != self.dropped]

    def shape(self, setup: Setup) -> Shape:
        """The shape of its plan; the number of micro-batches is rounded up if they do not divide evenly."""
        num = len(self.pipelines(setup))
        return Shape(num, setup.stages, -(-setup.pipelines * setup.microbatches // num))

    def num_samples(self, setup: Setup) -> int:
        """The number of samples in an iteration."""
        return self.shape(setup).num_chains * setup.samples


def variants(setup: Setup) -> list[Variant]:
    """Return all variants of the study."""
    return elastic_variants(setup) if setup.study == ELASTIC else technique_variants(setup)


def chosen_variants(setup: Setup, names: str | None) -> list[Variant]:
    """Return the variants of the study with these names, separated by commas, or all; the baseline is always among them."""
    known = variants(setup)
    if names is None:
        return known
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in {variant.name for variant in known}]:
        possible = ", ".join(variant.name for variant in known)
        raise UserError(f"{unknown[0]!r} is no variant of the study {setup.study}: the variants are {possible}")
    return [variant for variant in known if variant.name in (baseline_name(setup), *wanted)]


def baseline_name(setup: Setup) -> str:
    """The name of the variant that all others are compared with."""
    return FAULT_FREE if setup.study == ELASTIC else ONE_F_ONE_B


def elastic_variants(setup: Setup) -> list[Variant]:
    """From the fault-free ones to a slow worker: re-routing beside cuts, and beside whole layers that are moved."""
    stage = setup.stages // 2
    one, two = f"W1_{stage}", f"W0_{stage},W1_{stage}"
    every = ",".join(f"W{number % setup.pipelines}_{number}" for number in range(setup.stages))
    slow = f"{one}={SLOW}"
    moved = layers_by_capacity(setup.layers, [setup.pipelines - (number == stage) for number in range(setup.stages)])
    ours = partial(Variant, techniques=_ALL)
    found = [
        ours(FAULT_FREE, "nobody dead"),
        ours("shared", f"nobody dead, {SHARED} shared layers", shared_layers=SHARED),
        ours(REROUTED, "one dead, re-routed", dead=one),
        ours("moved", "one dead, whole layers moved", dead=one, layers=moved),
        ours(CUT, f"one dead, cut at {SHARED} shared layers", dead=one, shared_layers=SHARED),
        ours("two-rerouted", "two dead in a stage, re-routed", dead=two),
        ours("two-cut", "two dead in a stage, cut", dead=two, shared_layers=SHARED),
        ours("every-rerouted", "one dead in every stage, re-routed", dead=every),
        ours("every-cut", "one dead in every stage, cut", dead=every, shared_layers=SHARED),
        ours("slow", f"one at {SLOW:.0%} of its speed", slow=slow),
        ours(SLOW_CUT, f"one at {SLOW:.0%}, known, cut", slow=slow, knows_speeds=True, shared_layers=SHARED),
    ]
    return found if setup.pipelines > 2 else [variant for variant in found if variant.dead != two]


def layers_by_capacity(num_layers: int, num_live: Sequence[int]) -> tuple[int, ...]:
    """How many whole layers each stage gets, at least one, so that the slowest stage with so many live workers is fastest.

    Each further layer goes where the load of a worker after it is least.
    """
    layers = [1] * len(num_live)
    for _ in range(num_layers - len(layers)):
        best = min(range(len(layers)), key=lambda stage: ((layers[stage] + 1) / num_live[stage], stage))
        layers[best] += 1
    return tuple(layers)


def technique_variants(setup: Setup) -> list[Variant]:
    """From the fault-free ones to one dead worker in every stage."""
    last = setup.pipelines - 1
    every = ",".join(f"W{stage % setup.pipelines}_{stage}" for stage in range(setup.stages))
    one = f"W{min(1, last)}_{setup.stages // 2}"
    two = f"{one},W0_{setup.stages // 2 - 1}"
    return [
        Variant(ONE_F_ONE_B, "1F1B", "none"),
        Variant(FAULT_FREE, "ReCycle, all techniques", "adaptive,decoupled,staggered"),
        Variant(TORCH_1F1B, "torch 1F1B"),
        Variant(TORCH_ZERO_BUBBLE, "torch zero bubble (ZB1P)"),
        Variant(TORCH_ZBV, "torch zero bubble (ZBV)"),
        Variant(DROPPED, "its pipeline dropped, 1F1B", "none", one, dropped=min(1, last)),
        Variant(ADAPTIVE, "adaptive", "adaptive", one),
        Variant(DECOUPLED, "+ decoupled", "adaptive,decoupled", one),
        Variant(STAGGERED, "+ staggered", "adaptive,decoupled,staggered", one),
        Variant("two-dead", "two dead", "adaptive,decoupled,staggered", two),
        Variant("every-stage", "one dead in every stage", "adaptive,decoupled,staggered", every),
    ]
