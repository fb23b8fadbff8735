"""The variants that `recycle bench cluster` compares: schedules with and without dead workers, each as data."""

from collections.abc import Sequence
from dataclasses import dataclass

from recycle.core.cluster import Shape, Worker
from recycle.evaluate.hardware.setup import Setup
from recycle.evaluate.hardware.torch_contender import TORCH_1F1B, TORCH_ZBV, TORCH_ZERO_BUBBLE

ONE_F_ONE_B, FAULT_FREE = "1f1b", "all"
ADAPTIVE, DECOUPLED, STAGGERED = "adaptive", "decoupled", "staggered"
DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the results. Empty techniques mean a schedule of torch; the techniques `none` mean 1F1B.

    `dropped` is a pipeline that is left out: the other pipelines run its micro-batches besides their own.
    """

    name: str
    title: str
    techniques: str = ""
    dead: str = ""
    dropped: int | None = None

    @property
    def is_torch(self) -> bool:
        return not self.techniques

    @property
    def failed(self) -> frozenset[Worker]:
        """The dead workers of its plan; none if their whole pipeline is dropped."""
        return frozenset(map(Worker.parse, self.dead.split(","))) if self.dead and self.dropped is None else frozenset()

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
    """Return all variants, from the fault-free ones to one dead worker in every stage."""
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
