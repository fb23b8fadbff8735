"""The reference: Oobleck, Varuna and Bamboo by the rules of the simulator with which Oobleck's authors compared them.

It holds our policies against others' numbers: fed with their table of throughput by nodes and their pauses, it must land on their
averages. It is kept apart from `course`, because that simulator counts in ways which are no policy. Each such way is a switch of
`Quirks`; with all of them on it counts as the reference does, with none the policy alone is left. What the two share, Bamboo's
take-over and its rule of rebalancing, is written once, in `systems.bamboo`.

Without any quirk it still differs from `course`: a step's time comes from a table, not from a profile; a pipeline takes 12 nodes
in all three systems; a node is ready 45 s after it joins, also at the start, and the first meeting takes a whole pause, too; a
node that joins a running job is used at the next meeting; time is in whole milliseconds.
"""

import heapq
from collections import Counter
from collections.abc import Sequence

from recycle.core.errors import UserError
from recycle.core.events.trace import Trace
from recycle.sim.reference.run import ALL_QUIRKS, DEPTH, NO_QUIRKS, Quirks, ReferenceRun, ReferenceSystem
from recycle.sim.systems.bamboo import FATAL_US, SLOWDOWN, take_over, wants_rebalance
from recycle.sim.systems.published_costs import COSTS, PublishedCosts

__all__ = ["ALL_QUIRKS", "COSTS", "NO_QUIRKS", "PublishedCosts", "Quirks", "reference_average"]

CHECKPOINT_EVERY = 10


def reference_average(system: str, model: str, table: Sequence[float], trace: Trace, quirks: Quirks = ALL_QUIRKS) -> float:
    """Return the samples/s of `system` over `trace`; `table` has its samples/s with 30 nodes, 29, and so on down.

    An empty table is a system that is out of memory. More nodes than 30 count as 30, fewer than the table has as its last.
    """
    if system not in _RUNS or model not in COSTS:
        unknown, known = (system, _RUNS) if system not in _RUNS else (model, COSTS)
        raise UserError(f"the reference does not know {unknown!r}: choose from {', '.join(known)}")
    return _RUNS[system](COSTS[model], table, trace, quirks).average() if table else 0.0


class _Oobleck(ReferenceRun):
    """Every removal is a meeting, and nothing else ever is."""

    def pause_ms(self, kind: ReferenceSystem) -> int:
        return self.costs.reconfigure_ms

    def lose(self, at_ms: int, node: str) -> None:
        self.meet(at_ms)

    def finish_step(self, at_ms: int) -> None:
        self.credit(at_ms)
        self.enter(at_ms + self.step_ms, ReferenceSystem.STEP_ENDS)


class _Varuna(ReferenceRun):
    """Every removal rolls back to the last whole checkpoint, and is a meeting. A torn checkpoint costs the last ten steps."""

    def __init__(self, costs: PublishedCosts, table: Sequence[float], trace: Trace, quirks: Quirks) -> None:
        super().__init__(costs, table, trace, quirks)
        self.saved_ms = 0
        self.num_steps = 0
        self.has_lost = False
        self.last_row: int | None = None  # of the configuration that is left

    def pause_ms(self, kind: ReferenceSystem) -> int:
        by_nodes = self.costs is COSTS["bert-large"] and self.quirks.restart_by_nodes and self.last_row is not None
        restart_ms = _bert_restart_ms(self.last_row or 0) if by_nodes else self.costs.restart_ms
        return restart_ms - self.costs.checkpoint_ms

    def seat(self, guests: list[str]) -> None:
        if self.num_pipelines:
            self.last_row = self.row()

    def lose(self, at_ms: int, node: str) -> None:
        self.has_lost = True
        self.take_back(sum(start < self.saved_ms for start in self.starts))
        self.meet(at_ms)

    def finish_step(self, at_ms: int) -> None:
        self.credit(at_ms)
        self.num_steps += 1
        is_due = self.has_lost and self.quirks.checkpoint_after_removal
        if self.num_steps % CHECKPOINT_EVERY == 0 or is_due:
            self.has_lost = False
            self.last_ms = at_ms = at_ms + self.costs.checkpoint_ms
            self.checkpoint(at_ms)
        self.enter(at_ms + self.step_ms, ReferenceSystem.STEP_ENDS)

    def checkpoint(self, at_ms: int) -> None:
        """Write a checkpoint that is paid for at `at_ms`; whether it will be torn is looked up in what is to happen."""
        complete_ms = at_ms + self.costs.checkpoint_ms if self.quirks.late_checkpoint else at_ms
        self.enter(complete_ms, ReferenceSystem.CHECKPOINT_ENDS)
        if self.is_torn(complete_ms):
            self.num_steps = max(0, self.num_steps - CHECKPOINT_EVERY)
            self.take_back(max(0, len(self.starts) - CHECKPOINT_EVERY))
        else:
            self.saved_ms = at_ms

    def is_torn(self, complete_ms: int) -> bool:
        if not self.quirks.array_scan:
            return any(entry.kind == ReferenceSystem.REMOVE and entry.at_ms < complete_ms for entry in self.heap)
        heapq.heapify(self.heap)
        kinds = [entry.kind for entry in self.heap]
        return ReferenceSystem.REMOVE in kinds[: kinds.index(ReferenceSystem.CHECKPOINT_ENDS)]


def _bert_restart_ms(row: int) -> int:
    """The restart of BERT-large after a configuration of 30 nodes, 29, and so on; from 26 down it falls by 3.7 s a node."""
    return (71_300, 67_600, 67_600, 49_100)[row] if row < 4 else 112_000 - 3_700 * (row - 4)


class _Bamboo(ReferenceRun):
    """A predecessor takes over; steps are slower until the next meeting, which follows a step if the pipelines ask for it."""

    def __init__(self, costs: PublishedCosts, table: Sequence[float], trace: Trace, quirks: Quirks) -> None:
        super().__init__(costs, table, trace, quirks)
        self.pipelines: list[tuple[str, ...]] = []  # who holds each stage; "" if nobody does after a fatal loss
        self.is_slow = False
        self.hit_ms: int | None = None  # when the step under way became slow

    def pause_ms(self, kind: ReferenceSystem) -> int:
        return self.costs.rebalance_ms if kind == ReferenceSystem.REBALANCE_ENDS else FATAL_US // 1000

    def seat(self, guests: list[str]) -> None:
        self.is_slow, self.hit_ms = False, None
        if guests:
            self.pipelines = [tuple(guests[n * DEPTH : (n + 1) * DEPTH]) for n in range(self.num_pipelines)]

    def lose(self, at_ms: int, node: str) -> None:
        number = next((number for number, pipeline in enumerate(self.pipelines) if node in pipeline), None)
        if number is not None:
            pipeline = self.pipelines[number]
            after = take_over(pipeline, node)
            self.pipelines[number] = after or tuple("" if holder == node else holder for holder in pipeline)
            if after is None:
                self.meet(at_ms)
                return
        is_hit = number is not None or self.quirks.idle_loss_slows
        if is_hit and self.status == "running" and not self.is_slow:
            self.is_slow, self.hit_ms = True, at_ms
            self.step_ms = int(self.step_ms * SLOWDOWN)

    def finish_step(self, at_ms: int) -> None:
        if self.hit_ms is not None:  # the rest of this step was slower
            late_ms, self.hit_ms = int((at_ms - self.hit_ms) * (SLOWDOWN - 1)), None
            self.enter(at_ms + late_ms, ReferenceSystem.STEP_ENDS)
            return
        self.credit(at_ms)
        if wants_rebalance(self.num_pipelines, DEPTH, self.num_overloaded, self.num_spare):
            self.meet(at_ms, ReferenceSystem.REBALANCE_ENDS)
        else:
            self.enter(at_ms + self.step_ms, ReferenceSystem.STEP_ENDS)

    @property
    def num_overloaded(self) -> int:
        held = Counter(node for pipeline in self.pipelines for node in pipeline if node)
        return sum(number > 1 for number in held.values())


_RUNS: dict[str, type[ReferenceRun]] = {"oobleck": _Oobleck, "varuna": _Varuna, "bamboo": _Bamboo}
