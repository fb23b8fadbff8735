"""What a replay did: when every op, reduction and step ran, and what each of them waited for."""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from recycle.core.cluster import Worker
from recycle.core.events.record import OpRan, Started
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import makespan_us, stage_windows
from recycle.core.problem import Problem
from recycle.sim.replay.op_graph import Ints, OpGraph

NOTHING = -1  # an op that waited for nothing: the first of a row in the first iteration
REDUCE, OPTIMIZER = "reduce", "optimizer"


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """Times by iteration and op, and by iteration and stage. An op is numbered as in its program.

    `causes` names what an op waited for longest, not counting the plan's clock: the op before it in its row, or the one that sent
    it a message, by `iteration * num_ops + op`; the step before its iteration, as `step_cause(stage)`; or NOTHING.
    """

    program: OpGraph
    ready_us: Ints  # when all was there that an op waited for; only the plan's clock may keep it from starting then
    starts_us: Ints
    ends_us: Ints
    causes: Ints
    reduce_starts_us: Ints
    reduce_ends_us: Ints
    reduce_causes: Ints  # the op that ended last
    step_starts_us: Ints
    step_ends_us: Ints
    step_causes: Ints  # the stage whose reduction it waited for

    def __post_init__(self) -> None:
        for name in self.__slots__[1:]:
            getattr(self, name).flags.writeable = False

    @property
    def plan(self) -> Plan:
        return self.program.plan

    @property
    def problem(self) -> Problem:
        return self.program.problem

    @property
    def num_iterations(self) -> int:
        return len(self.starts_us)

    @property
    def completions_us(self) -> list[int]:
        """When the last stage has stepped, by iteration."""
        return [int(end) for end in self.step_ends_us.max(axis=1)]

    @property
    def periods_us(self) -> list[int]:
        """Time between two completions; that before the first one is where the plan would have had it."""
        planned = min(first for first, _ in stage_windows(self.plan)) + makespan_us(self.plan)
        ends = [planned - self.plan.period_us, *self.completions_us]
        return [after - before for before, after in pairwise(ends)]

    @property
    def steady_period_us(self) -> float:
        """The mean period of the later half of the iterations, in which the start is forgotten."""
        later = self.periods_us[self.num_iterations // 2 :]
        return sum(later) / len(later)

    @property
    def steady_iteration(self) -> int:
        """The iteration to look at: not the first, and with one after it, where there are so many."""
        return max(self.num_iterations - 2, min(1, self.num_iterations - 1))

    def makespan_us(self, iteration: int) -> int:
        """Time from the first op of an iteration to the end of its last step."""
        return int(self.step_ends_us[iteration].max() - self.starts_us[iteration].min())

    def started(self, name: str) -> Started:
        return Started("replay", name)

    def events(self, iterations: Iterable[int] | None = None, workers: Container[Worker] | None = None) -> Iterator[OpRan]:
        """Yield what workers did, all unless some are named, iteration by iteration and row by row, each in order of time."""
        texts = self._texts()
        for iteration in range(self.num_iterations) if iterations is None else iterations:
            for number, row in enumerate(self.plan.rows):
                if workers is not None and row.worker not in workers:
                    continue
                first, last = self.program.bounds[number : number + 2].tolist()
                starts, ends = (times[iteration, first:last].tolist() for times in (self.starts_us, self.ends_us))
                name = str(row.worker)
                for text, start, end in zip(texts[first:last], starts, ends, strict=True):
                    yield OpRan(iteration, name, text, start, end)
                yield from self._finish(iteration, name, row.worker.stage)

    def _finish(self, iteration: int, name: str, stage: int) -> Iterator[OpRan]:
        place = iteration, stage
        for what, starts, ends in (
            (REDUCE, self.reduce_starts_us, self.reduce_ends_us),
            (OPTIMIZER, self.step_starts_us, self.step_ends_us),
        ):
            if ends[place] > starts[place]:
                yield OpRan(iteration, name, what, int(starts[place]), int(ends[place]))

    def _texts(self) -> list[str]:
        num = self.problem.shape.num_microbatches
        return [
            f"{row.worker.stage}{kind}{chain % num}@{chain // num}"
            for row in self.plan.rows
            for kind, chain in zip(row.kinds, row.chains, strict=True)
        ]


def step_cause(stage: int) -> int:
    """The cause of an op that waited for the step of `stage`; the same function turns it back into the stage."""
    return -2 - stage
