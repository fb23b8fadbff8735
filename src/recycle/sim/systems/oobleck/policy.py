"""Oobleck (SOSP'23): pipelines of unequal depth, from templates made in advance; a failure shortens, refills or merges them.

Assumptions, the peer at its best:
- A node is a worker. `oobleck_templates` says which sizes pipelines may have and how layers are cut; a node has one stage. That
  the smallest size holds the model, by Oobleck's own rule, is all that is asked of memory.
- The first pipelines are the fastest that `oobleck_instances` finds for all nodes; the global batch is fixed and split best.
- A lost node leaves its pipeline, which takes the template of its smaller size. Below the smallest size it borrows nodes from the
  biggest pipeline that can spare one; where none can, it merges with the smallest other one. The batch is split anew.
- The interrupted iteration is run again. Noticing, new groups and the copies of missing layers take `reconfigure_us` together,
  whatever is copied; a failure meanwhile begins it anew.
- A node that joins waits for the next reconfiguration, which then instantiates all nodes anew. The loss of one that waits changes
  nothing. With `reinstantiates`, every reconfiguration instantiates anew.
- With fewer nodes than the smallest size the job waits for one, and then goes on where it was: no layer is ever lost for good.
- Nodes beyond the size of the cluster are not used.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import DOWN, Event, Loss, Members, PolicyDecision, Regime, pauses
from recycle.sim.systems.oobleck.instances import best_sizes, instances, layout_iteration_us

Pipelines = tuple[tuple[Worker, ...], ...]


@dataclass(frozen=True, slots=True)
class OobleckLayout:
    """Which nodes make up each pipeline, and which wait for the next reconfiguration. Without a pipeline the job is down."""

    pipelines: Pipelines
    waiting: frozenset[Worker]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted(map(len, self.pipelines), reverse=True))


@dataclass(frozen=True, slots=True)
class Oobleck:
    """The policy; its state is the `OobleckLayout`."""

    job: SimulatedJob
    reconfigure_us: int
    faults: int = 3
    reinstantiates: bool = False
    name: str = "oobleck"

    def __post_init__(self) -> None:
        if self.faults < 0:
            raise UserError(f"oobleck shall bear {self.faults} faults, but it must be a whole number of at least 0")

    def begin(self, members: Members) -> PolicyDecision:
        layout, regime = self._checked(self._instantiated(members.live), members)
        return PolicyDecision(regime, reason=_reason(layout), state=layout)

    def change(self, event: Event, state: Any) -> PolicyDecision:
        assert isinstance(state, OobleckLayout)
        left = set(event.left)
        kept = tuple(tuple(node for node in pipeline if node not in left) for pipeline in state.pipelines)
        if kept and kept == state.pipelines:
            layout, regime = self._checked(kept, event.members)
            reason = f"no pipeline is touched, {len(layout.waiting)} nodes wait"
            return PolicyDecision(regime, (), Loss.NOTHING, reason, layout, keeps_unfinished=True)
        layout, regime = self._checked(self._reconfigured(kept, event.members.live), event.members)
        wait = () if regime.is_down else pauses(("reconfigure", self.reconfigure_us))
        return PolicyDecision(regime, wait, Loss.STEP, _reason(layout), layout)

    def _reconfigured(self, kept: Pipelines, live: frozenset[Worker]) -> Pipelines:
        """The pipelines after a failure, or after the job was down."""
        if self.reinstantiates or not kept or live - _nodes(kept):
            return self._instantiated(live)
        return repair(kept, instances(self.job, self.faults).sizes)

    def _instantiated(self, live: frozenset[Worker]) -> Pipelines:
        """New pipelines of the best sizes, filled with the nodes in order."""
        nodes = iter(sorted(live))
        return tuple(tuple(next(nodes) for _ in range(size)) for size in best_sizes(self.job, self.faults, len(live)))

    def _checked(self, pipelines: Pipelines, members: Members) -> tuple[OobleckLayout, Regime]:
        """The layout of these pipelines and its steady state; without a pipeline every node waits and the job is down."""
        layout = OobleckLayout(pipelines, members.live - _nodes(pipelines))
        if not pipelines:
            return layout, DOWN
        step_us = layout_iteration_us(self.job, self.faults, layout.sizes)
        busy_share = min(1.0, instances(self.job, self.faults).costs.work_us / (step_us * members.num_live))
        return layout, Regime(self.job.scaled_us(step_us), self.job.samples_per_step, busy_share)


def repair(pipelines: Pipelines, sizes: range) -> Pipelines:
    """Return pipelines of these sizes, made of what failures have left of `pipelines`; none if all together are too few.

    No node is left out, except where a merged pipeline would have more than the biggest size.
    """
    fewest, most = sizes[0], sizes[-1]
    groups = [list(pipeline) for pipeline in pipelines]
    while short := [group for group in groups if len(group) < fewest]:
        needy, biggest = max(short, key=len), max(groups, key=len)
        if len(biggest) > fewest:
            needy.append(biggest.pop())
            continue
        groups.remove(needy)
        if not groups:
            return ()
        min(groups, key=len).extend(needy)
    return tuple(tuple(group[:most]) for group in groups)


def _nodes(pipelines: Pipelines) -> frozenset[Worker]:
    return frozenset(node for pipeline in pipelines for node in pipeline)


def _reason(layout: OobleckLayout) -> str:
    if not layout.pipelines:
        return "too few nodes for a pipeline"
    sizes = ", ".join(f"{number} of {size}" for size, number in Counter(layout.sizes).items())
    return f"pipelines by nodes: {sizes}; {len(layout.waiting)} nodes wait"
