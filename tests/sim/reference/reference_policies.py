"""Oobleck, Varuna and Bamboo by the rules of the public simulator with which Oobleck's authors compared them: a test oracle.

Given the authors' table of throughput by nodes and their pauses, the oracle must give the authors' averages. It is separate from
`sim.campaign.trace_simulation`, because the authors' simulator counts in ways that belong to no policy. Each of these ways is a
switch of `Deviations`: with all of them the oracle counts as the authors' simulator does; with none, the policy alone is left.
The rules that both share, Bamboo's take-over and its rebalancing, are imported from `sim.systems.bamboo`.

Without any deviation it still differs from `trace_simulation`: the time of a step comes from a table, not from a profile; a
pipeline takes 12 nodes in all three systems; a node is ready 45 s after it joins, also at the start, and the first rendezvous
takes a whole pause, too; a node that joins a running job is used at the next rendezvous; time is in whole milliseconds.
"""

import heapq
from collections import Counter
from collections.abc import Sequence

from recycle.core.errors import UserError
from recycle.core.events.trace import Trace
from recycle.sim.systems.bamboo import SLOWDOWN, take_over, wants_rebalance
from recycle.sim.systems.constants import BambooConstants
from tests.sim.reference.published_costs import COSTS, PublishedCosts
from tests.sim.reference.reference_simulation import (
    ALL_DEVIATIONS,
    DEPTH,
    NO_DEVIATIONS,
    Deviations,
    EventKind,
    ReferenceSimulation,
)

CHECKPOINT_EVERY = 10


def reference_average(
    system: str, model: str, table: Sequence[float], trace: Trace, deviations: Deviations = ALL_DEVIATIONS
) -> float:
    """Return the samples/s of `system` over `trace`; `table` has its samples/s with 30 nodes, 29, and so on down.

    An empty table is a system that is out of memory. More nodes than 30 count as 30, fewer than the table has as its last.
    """
    if system not in _SIMULATIONS or model not in COSTS:
        unknown, known = (system, _SIMULATIONS) if system not in _SIMULATIONS else (model, COSTS)
        raise UserError(f"the reference does not know {unknown!r}: choose from {', '.join(known)}")
    return _SIMULATIONS[system](COSTS[model], table, trace, deviations).average() if table else 0.0


def reference_start_ms(system: str, model: str, table: Sequence[float], trace: Trace) -> int:
    """When the reference starts to train: 0 if it never does."""
    simulation = _SIMULATIONS[system](COSTS[model], table, trace, NO_DEVIATIONS) if table else None
    if simulation is not None:
        simulation.average()
    return (simulation.first_ms or 0) if simulation else 0


class OobleckReference(ReferenceSimulation):
    """Every removal starts a rendezvous, and nothing else does."""

    def pause_ms(self, kind: EventKind) -> int:
        return self.costs.reconfigure_ms

    def remove(self, at_ms: int, node: str) -> None:
        self.start_rendezvous(at_ms)

    def finish_step(self, at_ms: int) -> None:
        self.credit(at_ms)
        self.schedule(at_ms + self.step_ms, EventKind.STEP_ENDS)


class VarunaReference(ReferenceSimulation):
    """Every removal rolls back to the last whole checkpoint. An interrupted checkpoint costs the last ten steps."""

    def __init__(self, costs: PublishedCosts, table: Sequence[float], trace: Trace, deviations: Deviations) -> None:
        super().__init__(costs, table, trace, deviations)
        self.saved_ms = 0
        self.num_steps = self.num_saved = 0
        self.has_removal = False
        self.last_index: int | None = None  # of the configuration before

    def pause_ms(self, kind: EventKind) -> int:
        by_nodes = self.costs is COSTS["bert-large"] and self.deviations.restart_by_nodes and self.last_index is not None
        restart_ms = _bert_restart_ms(self.last_index or 0) if by_nodes else self.costs.restart_ms
        return restart_ms - self.costs.checkpoint_ms

    def assign_stages(self, participants: list[str]) -> None:
        if self.num_pipelines:
            self.last_index = self.table_index()

    def remove(self, at_ms: int, node: str) -> None:
        self.has_removal = True
        if not self.deviations.lost_steps_count:
            self.num_steps = self.num_saved
        self.roll_back(sum(start < self.saved_ms for start in self.starts))
        self.start_rendezvous(at_ms)

    def finish_step(self, at_ms: int) -> None:
        self.credit(at_ms)
        self.num_steps += 1
        is_due = self.has_removal and self.deviations.checkpoint_after_removal
        if self.num_steps % CHECKPOINT_EVERY == 0 or is_due:
            self.has_removal = False
            self.last_ms = at_ms = at_ms + self.costs.checkpoint_ms
            self.checkpoint(at_ms)
        self.schedule(at_ms + self.step_ms, EventKind.STEP_ENDS)

    def checkpoint(self, at_ms: int) -> None:
        """Write a checkpoint that is paid for at `at_ms`; the scheduled events tell whether it will be interrupted."""
        complete_ms = at_ms + self.costs.checkpoint_ms if self.deviations.late_checkpoint else at_ms
        self.schedule(complete_ms, EventKind.CHECKPOINT_ENDS)
        if self.is_interrupted(complete_ms):
            self.num_steps = max(0, self.num_steps - CHECKPOINT_EVERY)
            self.lose_last_steps()
        else:
            self.saved_ms, self.num_saved = at_ms, self.num_steps

    def lose_last_steps(self) -> None:
        num_lost = min(CHECKPOINT_EVERY, len(self.rates_ms))
        num_written = CHECKPOINT_EVERY if self.deviations.torn_checkpoint_shifts else num_lost
        self.rates_ms[len(self.rates_ms) - num_lost :] = [0] * num_written

    def is_interrupted(self, complete_ms: int) -> bool:
        if not self.deviations.heap_array_scan:
            return any(event.kind == EventKind.REMOVE and event.at_ms < complete_ms for event in self.heap)
        heapq.heapify(self.heap)
        kinds = [event.kind for event in self.heap]
        return EventKind.REMOVE in kinds[: kinds.index(EventKind.CHECKPOINT_ENDS)]


def _bert_restart_ms(row: int) -> int:
    """The restart of BERT-large after a configuration of 30 nodes, 29, and so on; from 26 down it falls by 3.7 s a node."""
    return (71_300, 67_600, 67_600, 49_100)[row] if row < 4 else 112_000 - 3_700 * (row - 4)


class BambooReference(ReferenceSimulation):
    """A predecessor takes over; steps are slower until the next rendezvous, which follows a step if a rebalance is due."""

    def __init__(self, costs: PublishedCosts, table: Sequence[float], trace: Trace, deviations: Deviations) -> None:
        super().__init__(costs, table, trace, deviations)
        self.pipelines: list[tuple[str, ...]] = []  # the node that holds each stage; "" after a fatal loss
        self.is_slow = False
        self.slowed_at_ms: int | None = None  # when the step in flight became slow

    def pause_ms(self, kind: EventKind) -> int:
        return self.costs.rebalance_ms if kind == EventKind.REBALANCE_ENDS else BambooConstants(0).fatal_us // 1000

    def assign_stages(self, participants: list[str]) -> None:
        self.is_slow, self.slowed_at_ms = False, None
        if participants:
            self.pipelines = [tuple(participants[n * DEPTH : (n + 1) * DEPTH]) for n in range(self.num_pipelines)]

    def remove(self, at_ms: int, node: str) -> None:
        number = next((number for number, pipeline in enumerate(self.pipelines) if node in pipeline), None)
        if number is not None:
            pipeline = self.pipelines[number]
            after = take_over(pipeline, node)
            self.pipelines[number] = after or tuple("" if holder == node else holder for holder in pipeline)
            if after is None:
                self.start_rendezvous(at_ms)
                return
        slows_down = number is not None or self.deviations.spare_loss_slows
        if slows_down and self.status == "running" and not self.is_slow:
            self.is_slow, self.slowed_at_ms = True, at_ms
            self.step_ms = int(self.step_ms * SLOWDOWN)

    def finish_step(self, at_ms: int) -> None:
        if self.slowed_at_ms is not None:  # the rest of this step was slower
            late_ms, self.slowed_at_ms = int((at_ms - self.slowed_at_ms) * (SLOWDOWN - 1)), None
            self.schedule(at_ms + late_ms, EventKind.STEP_ENDS)
            return
        self.credit(at_ms)
        if wants_rebalance(self.num_pipelines, DEPTH, self.num_overloaded, self.num_spare):
            self.start_rendezvous(at_ms, EventKind.REBALANCE_ENDS)
        else:
            self.schedule(at_ms + self.step_ms, EventKind.STEP_ENDS)

    @property
    def num_overloaded(self) -> int:
        held = Counter(node for pipeline in self.pipelines for node in pipeline if node)
        return sum(number > 1 for number in held.values())


_SIMULATIONS: dict[str, type[ReferenceSimulation]] = {
    "oobleck": OobleckReference,
    "varuna": VarunaReference,
    "bamboo": BambooReference,
}
