"""The Oobleck policy (SOSP'23): pipelines of unequal depth from templates; a failure shortens, refills or merges them.

Assumptions, in favour of Oobleck:
- A node is a worker with one stage. `templates` has the sizes that pipelines may have and how layers are cut. Memory is checked
  only by Oobleck's own rule for the smallest size.
- The first pipelines are the fastest that `instances` finds for all nodes; the global batch is fixed and split optimally.
- A pipeline that loses a node takes the template of the smaller size. Below the smallest size it borrows nodes from the biggest
  pipeline that can spare one; if none can, it merges with the smallest other pipeline. The batch is split again.
- The interrupted iteration is repeated. Detection, new groups and copies of missing layers take `reconfigure_us` together,
  independent of the copied bytes; a failure during this pause starts it again.
- A node that joins waits for the next reconfiguration, which then instantiates pipelines from all nodes. The loss of a waiting
  node changes nothing.
- With fewer nodes than the smallest size the job waits for a node, and then continues: no layer is ever lost for good.
- Nodes beyond the size of the cluster are not used.
- With the zero-bubble schedule, which is not published for Oobleck, pipelines hide as much of their bubbles as memory allows.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.sim.fault_free_schedule import FaultFreeSchedule
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import DOWN, Loss, Members, MembershipChange, PolicyDecision, SteadyState, pauses
from recycle.sim.systems.oobleck.instances import Instances, best_sizes, instances, layout_iteration_us

Pipelines = tuple[tuple[Worker, ...], ...]


@dataclass(frozen=True, slots=True)
class OobleckLayout:
    """The nodes of each pipeline, and the nodes that wait for the next reconfiguration. Without a pipeline the job is down."""

    pipelines: Pipelines
    waiting: frozenset[Worker]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted(map(len, self.pipelines), reverse=True))


@dataclass(frozen=True, slots=True)
class Oobleck:
    """The policy; its state is the `OobleckLayout`. Its pipelines run `schedule`, which as published is 1F1B."""

    job: SimulatedJob
    reconfigure_us: int
    faults: int = 3
    schedule: FaultFreeSchedule = FaultFreeSchedule.ONE_F_ONE_B

    @property
    def name(self) -> str:
        return f"oobleck{self.schedule.suffix}"

    def __post_init__(self) -> None:
        if self.faults < 0:
            raise UserError(f"oobleck shall bear {self.faults} faults, but it must be a whole number of at least 0")

    def begin(self, members: Members) -> PolicyDecision:
        layout, steady_state = self._timed(_layout(self._instantiated(members.live), members), members)
        return PolicyDecision(steady_state, reason=_reason(layout), state=layout)

    def change(self, event: MembershipChange, state: Any) -> PolicyDecision:
        assert isinstance(state, OobleckLayout)
        waiting = state.waiting.difference(event.left).union(event.joined)
        if state.pipelines and state.waiting.issuperset(event.left):
            layout, steady_state = self._timed(OobleckLayout(state.pipelines, waiting), event.members)
            reason = f"no pipeline is touched, {len(layout.waiting)} nodes wait"
            return PolicyDecision(steady_state, (), Loss.NOTHING, reason, layout, keeps_unfinished=True)
        kept = _without(state.pipelines, set(event.left))
        pipelines = self._instantiated(event.members.live) if waiting or not kept else self._repaired(kept)
        layout, steady_state = self._timed(_layout(pipelines, event.members), event.members)
        wait = () if steady_state.is_down else pauses(("reconfigure", self.reconfigure_us))
        return PolicyDecision(steady_state, wait, Loss.STEP, _reason(layout), layout)

    def _repaired(self, kept: Pipelines) -> Pipelines:
        """The pipelines of these nodes, if no other node waits."""
        return repair(kept, self._instances.sizes)

    def _instantiated(self, live: frozenset[Worker]) -> Pipelines:
        """New pipelines of the best sizes, filled with the nodes in order."""
        nodes = iter(sorted(live, key=lambda node: (node.pipeline, node.stage)))  # as workers are ordered, but faster
        sizes = best_sizes(self.job, self.faults, len(live), self.schedule)
        return tuple(tuple(next(nodes) for _ in range(size)) for size in sizes)

    def _timed(self, layout: OobleckLayout, members: Members) -> tuple[OobleckLayout, SteadyState]:
        """The layout and its steady state; without a pipeline the job is down."""
        if not layout.pipelines:
            return layout, DOWN
        step_us = layout_iteration_us(self.job, self.faults, layout.sizes, self.schedule)
        busy_share = min(1.0, self._instances.costs.work_us / (step_us * members.num_live))
        return layout, SteadyState(self.job.scaled_us(step_us), self.job.samples_per_step, busy_share)

    @property
    def _instances(self) -> Instances:
        return instances(self.job, self.faults, self.schedule)


def repair(pipelines: Pipelines, sizes: range) -> Pipelines:
    """Return pipelines of these sizes from the nodes that are left in `pipelines`; none if there are too few.

    All nodes are used, except where a merged pipeline would have more than the biggest size.
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


def _without(pipelines: Pipelines, left: set[Worker]) -> Pipelines:
    """The pipelines without these nodes."""
    return tuple(
        pipeline if left.isdisjoint(pipeline) else tuple(node for node in pipeline if node not in left) for pipeline in pipelines
    )


def _layout(pipelines: Pipelines, members: Members) -> OobleckLayout:
    """The layout of these pipelines; live nodes that they leave over wait."""
    # Sets know the hashes of their members, and tuples do not: to look at thousands of nodes at every change takes long.
    if sum(map(len, pipelines)) == len(members.live):
        return OobleckLayout(pipelines, frozenset())
    return OobleckLayout(pipelines, members.live.difference(*pipelines))


def _reason(layout: OobleckLayout) -> str:
    if not layout.pipelines:
        return "too few nodes for a pipeline"
    sizes = ", ".join(f"{number} of {size}" for size, number in Counter(layout.sizes).items())
    return f"pipelines by nodes: {sizes}; {len(layout.waiting)} nodes wait"
