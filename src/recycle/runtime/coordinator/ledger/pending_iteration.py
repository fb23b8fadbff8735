"""`PendingIteration`: an iteration that not all workers have reported yet, so that it is not in the record."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

from recycle.core.cluster import Worker
from recycle.core.plans.plan import Plan
from recycle.runtime.compute.optimizer_step import StepVerdict
from recycle.runtime.execute.spans import Span


@dataclass(slots=True)
class PendingIteration:
    """The plan of the iteration, the workers that must report it, and the reports so far.

    `reporters` has the present place of each by its place in the iteration, which its report names.
    """

    plan: Plan
    reporters: dict[Worker, Worker]
    losses: dict[int, float] = field(default_factory=dict)
    spans: dict[Worker, list[Span]] = field(default_factory=dict)
    verdict: StepVerdict | None = None
    checksums: dict[Worker, str] = field(default_factory=dict)

    @staticmethod
    def of_plan(plan: Plan) -> "PendingIteration":
        return PendingIteration(plan, {row.worker: row.worker for row in plan.rows})

    @staticmethod
    def of_names(plan: Plan, names: Mapping[str, str]) -> "PendingIteration":
        return PendingIteration(plan, {Worker.parse(then): Worker.parse(now) for then, now in names.items()})

    def names(self) -> dict[str, str]:
        """The reporters as text, for the journal."""
        return {str(then): str(now) for then, now in self.reporters.items()}

    def follow(self, survivors: Mapping[Worker, Worker]) -> None:
        """Go on in a new epoch: `survivors` are new places by present ones. Nobody else will report the iteration."""
        self.reporters = {then: survivors[now] for then, now in self.reporters.items() if now in survivors}

    def is_complete(self) -> bool:
        return self.reporters.keys() <= self.spans.keys()

    def mean_loss(self) -> float:
        """The loss; NaN if all workers of the last stage died with their reports, of which any one has the losses of all."""
        return fmean(self.losses[chain] for chain in sorted(self.losses)) if self.losses else math.nan

    def present_checksums(self) -> dict[Worker, str]:
        """The checksums of the workers that are still there, by their present places."""
        return {now: self.checksums[then] for then, now in self.reporters.items() if then in self.checksums}
