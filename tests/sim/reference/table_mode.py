"""The policies that users run, fed with a table of throughput by nodes: only the time of a step is replaced.

`table_average` gives the samples/s of `sim.systems` with the published costs, to be compared with `reference_average`. All other
decisions are those of the policy: who takes over, when pipelines are formed again, what is lost, which pauses follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from recycle.core.cluster import Shape, Worker
from recycle.core.events.record import Spell
from recycle.core.events.trace import Change, Trace
from recycle.sim.campaign.trace_simulation import simulate_trace
from recycle.sim.policy import DOWN, Loss, Members, PolicyDecision, SteadyState, System
from recycle.sim.systems import varuna
from recycle.sim.systems.bamboo import SLOWDOWN, Bamboo, BambooLayout
from recycle.sim.systems.constants import BambooConstants
from recycle.sim.systems.oobleck.policy import Oobleck, OobleckLayout, Pipelines
from tests.sim.reference.published_costs import COSTS, PublishedCosts
from tests.sim.reference.reference_policies import CHECKPOINT_EVERY
from tests.sim.reference.reference_simulation import DEPTH, MOST_NODES, READY_MS

SHAPE = Shape(5, 6, 1)  # 30 places: as many as the table has nodes


@dataclass(frozen=True)
class TableJob:
    """Stands for a job whose step takes what the table says for a number of nodes."""

    costs: PublishedCosts
    table: Sequence[float]
    shape: Shape = SHAPE

    @property
    def num_nodes(self) -> int:
        return self.shape.num_workers

    @property
    def samples_per_step(self) -> int:
        return self.costs.samples

    def scaled_us(self, time_us: int) -> int:
        return time_us

    def step_us(self, num_nodes: int) -> int:
        """The time of a step; 0 with fewer nodes than a pipeline takes, and where the table has no throughput."""
        samples_per_s = self.table[min(max(0, MOST_NODES - num_nodes), len(self.table) - 1)]
        return round(self.costs.samples / samples_per_s * 1_000_000) if samples_per_s and num_nodes >= DEPTH else 0


class OobleckByTable(Oobleck):
    """All nodes that take part are one pipeline, so that their number decides."""

    job: Any

    def _repaired(self, kept: Pipelines) -> Pipelines:
        return self._instantiated(frozenset(node for pipeline in kept for node in pipeline))

    def _instantiated(self, live: frozenset[Worker]) -> Pipelines:
        return (tuple(sorted(live)),)

    def _timed(self, layout: OobleckLayout, members: Members) -> tuple[OobleckLayout, SteadyState]:
        (nodes,) = layout.pipelines
        step_us = self.job.step_us(len(nodes))
        if step_us:
            return layout, SteadyState(step_us, self.job.samples_per_step)
        return OobleckLayout((), layout.waiting), DOWN


@dataclass(frozen=True)
class BambooByTable(Bamboo):
    """Pipelines of twelve stages; the step is that of the nodes of which they were formed, longer while one holds two stages."""

    job: Any
    num_formed: list[int] = field(default_factory=list)  # the live nodes whenever pipelines were formed
    is_out_of_memory = False

    def _decide(self, layout: BambooLayout, members: Members, costs: tuple[tuple[str, int], ...], loses: Loss) -> PolicyDecision:
        if costs or not self.num_formed:
            self.num_formed.append(members.num_live)
        return super()._decide(layout, members, costs, loses)

    def _steady_state(self, layout: BambooLayout, members: Members) -> SteadyState:
        step_us = self.job.step_us(self.num_formed[-1])
        slowdown = SLOWDOWN if layout.num_overloaded else 1.0
        return SteadyState(round(step_us * slowdown), self.job.samples_per_step, slowdown=slowdown)


def table_average(system: str, model: str, table: Sequence[float], trace: Trace) -> float:
    """Return the samples/s of the policy `system` over the whole of `trace`; an empty table is a system out of memory."""
    if not table:
        return 0.0
    job: Any = TableJob(COSTS[model], table)
    with patch.object(varuna, "best_layout", _layout_by_table):
        record = simulate_trace(_policy(system, job), trace, job.shape, READY_MS * 1000)
    return sum(event.samples for event in record if isinstance(event, Spell)) * 1e6 / trace.end_us


def from_start(trace: Trace, start_ms: int) -> Trace:
    """The trace from `start_ms` on: nodes that joined before are there from the start."""
    start_us = start_ms * 1000
    changes = tuple(Change(max(0, change.at_us - start_us), change.joins, change.node) for change in trace.changes)
    return Trace(changes, trace.end_us - start_us)


def _policy(system: str, job: Any) -> System:
    costs: PublishedCosts = job.costs
    if system == "oobleck":
        return OobleckByTable(job, costs.reconfigure_ms * 1000)
    if system == "bamboo":
        return BambooByTable(job, costs.rebalance_ms * 1000, BambooConstants(0).fatal_us, DEPTH)
    restart_ms = costs.restart_ms - costs.checkpoint_ms
    return varuna.Varuna(job, CHECKPOINT_EVERY, costs.checkpoint_ms * 1000, restart_ms * 1000)


def _layout_by_table(job: Any, num_nodes: int) -> varuna.VarunaLayout | None:
    step_us = job.step_us(num_nodes)
    return varuna.VarunaLayout(num_nodes // DEPTH, DEPTH, step_us, step_us) if step_us else None
