"""ReplayResult: when every op, reduction and step of a replay ran, and the cause that each of them waited for longest."""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from recycle.core.cluster import Worker
from recycle.core.events.op_columns import OPTIMIZER, REDUCE
from recycle.core.events.record import OpRan
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import makespan_us, stage_windows
from recycle.core.problem import Problem
from recycle.sim.replay.op_graph import Ints, OpGraph

NO_CAUSE = -1  # an op that waited for nothing: the first of a row in the first iteration


@dataclass(frozen=True, slots=True, eq=False)
class ReplayResult:
    """Times by iteration and op, and by iteration and stage. Ops are numbered as in `graph`.

    The cause of an op is the dependency that ended last; its planned start does not count. The cause is the op before it in its
    row, or the op that sent it a message, as `iteration * num_ops + op`; the step before its iteration, as `step_cause(stage)`;
    or NO_CAUSE.
    """

    graph: OpGraph
    ready_us: Ints  # when the last dependency of an op ended; a paced op may start later
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
        return self.graph.plan

    @property
    def problem(self) -> Problem:
        return self.graph.problem

    @property
    def num_iterations(self) -> int:
        return len(self.starts_us)

    @property
    def completions_us(self) -> list[int]:
        """When the last stage has stepped, by iteration."""
        return [int(end) for end in self.step_ends_us.max(axis=1)]

    @property
    def periods_us(self) -> list[int]:
        """Time between two completions. The completion before the first iteration is where the plan has it."""
        planned = min(first for first, _ in stage_windows(self.plan)) + makespan_us(self.plan)
        ends = [planned - self.plan.period_us, *self.completions_us]
        return [after - before for before, after in pairwise(ends)]

    @property
    def steady_period_us(self) -> float:
        """The mean period of the later half of the iterations, which the start no longer influences."""
        later = self.periods_us[self.num_iterations // 2 :]
        return sum(later) / len(later)

    @property
    def steady_iteration(self) -> int:
        """The iteration to show: neither the first nor the last one, if there are enough."""
        return max(self.num_iterations - 2, min(1, self.num_iterations - 1))

    def makespan_us(self, iteration: int) -> int:
        """Time from the first op of an iteration to the end of its last step."""
        return int(self.step_ends_us[iteration].max() - self.starts_us[iteration].min())

    def events(self, iterations: Iterable[int] | None = None, workers: Container[Worker] | None = None) -> Iterator[OpRan]:
        """Yield the executed ops of the workers (default: all), iteration by iteration and row by row, in order of time."""
        texts = self._texts()
        for iteration in range(self.num_iterations) if iterations is None else iterations:
            for number, row in enumerate(self.plan.rows):
                if workers is not None and row.worker not in workers:
                    continue
                ops = self.graph.ops_of_row(number)
                starts, ends = (times[iteration, ops].tolist() for times in (self.starts_us, self.ends_us))
                name = str(row.worker)
                for text, start, end in zip(texts[ops], starts, ends, strict=True):
                    yield OpRan(iteration, name, text, start, end)
                yield from self._finish(iteration, name, row.worker.stage)

    def _finish(self, iteration: int, name: str, stage: int) -> Iterator[OpRan]:
        at = iteration, stage
        for name_of_op, starts, ends in (
            (REDUCE, self.reduce_starts_us, self.reduce_ends_us),
            (OPTIMIZER, self.step_starts_us, self.step_ends_us),
        ):
            if ends[at] > starts[at]:
                yield OpRan(iteration, name, name_of_op, int(starts[at]), int(ends[at]))

    def _texts(self) -> list[str]:
        num = self.problem.shape.num_microbatches
        return [
            f"{row.worker.stage}{kind}{chain % num}@{chain // num}"
            for row in self.plan.rows
            for kind, chain in zip(row.kinds, row.chains, strict=True)
        ]


def step_cause(stage: int) -> int:
    """Encode the step of `stage` as the cause of an op; the function is its own inverse."""
    return -2 - stage
