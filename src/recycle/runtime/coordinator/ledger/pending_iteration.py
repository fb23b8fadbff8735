"""`PendingIteration`: an iteration that not all members have reported yet, so that it is not in the record."""

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from statistics import fmean

from recycle.core.cluster import Worker
from recycle.core.events.op_columns import OpColumns
from recycle.core.plans.plan import Plan
from recycle.runtime.compute.optimizer_step import StepVerdict


@dataclass(slots=True)
class PendingIteration:
    """The plan of the iteration, the numbers of the members that must report it, and the reports so far.

    A member is known by its number: its place may change before it reports, and its report names the place of that time.
    """

    plan: Plan
    reporters: AbstractSet[int]
    losses: dict[int, float] = field(default_factory=dict)
    ran: dict[int, tuple[Worker, OpColumns]] = field(default_factory=dict)
    verdict: StepVerdict | None = None
    checksums: dict[int, str] = field(default_factory=dict)

    def is_complete(self) -> bool:
        return len(self.reporters) <= len(self.ran) and self.reporters <= self.ran.keys()

    def mean_loss(self) -> float:
        """The loss; NaN if all workers of the last stage died with their reports, of which any one has the losses of all."""
        return fmean(self.losses[chain] for chain in sorted(self.losses)) if self.losses else math.nan

    def checksums_by_place(self, members: Mapping[int, Worker]) -> dict[Worker, str]:
        """The checksums of the members that are still there, by their present places."""
        return {members[member]: self.checksums[member] for member in self.reporters & self.checksums.keys() & members.keys()}
