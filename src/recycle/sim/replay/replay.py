"""`replay`: a discrete-event simulation of one plan for several iterations, op by op, in whole microseconds.

Replay checks a plan independently: it takes the dependencies from `rules`, and computes itself when everything ends.

- Every worker runs its row in order, iteration after iteration. An op starts when its worker is free and all ops of `rules.needs`
  have ended and their messages have arrived. A message takes `rules.lag_us` and does not occupy the workers. With `contention`,
  each worker has one link out to other stages and one link in from them; a message occupies both for its bytes over the bandwidth
  (not for the latency), and messages go in the order in which they are sent.
- When the last op of a stage has ended on all its live workers, their reduction begins, and after it the step. Staggered: the
  stage then starts its next iteration alone. Synchronous: all stages step when the last reduction has ended, and the next
  iteration starts when the longest step has ended. A layer that several stages use is stepped when all of them are done with it;
  staggered, its next use waits for that, at whichever stage.
- Paced: no op starts before `iteration * period` plus its planned start. So a legal plan runs exactly as planned, and every
  iteration takes exactly the period; an illegal plan is late.
- Eager: the order of the rows alone decides, as in the runtime. Only in the first iteration a stage waits for its planned start,
  as if an iteration had run before. Without noise no step is later than planned, and each step is at most one period P after the
  step before it: if everything starts at most P later than in the iteration before, everything is ready again at most P later.
- Jitter multiplies the duration of each op by 1 + jitter * z, where z is normal and limited to 3 deviations; `slow` multiplies
  the ops of a worker. Reductions and steps take the time of the profile.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import stage_windows
from recycle.sim.replay.jitter import disturbed_durations_us
from recycle.sim.replay.op_graph import ABSENT, Ints, OpGraph, build_op_graph
from recycle.sim.replay.replay_result import NO_CAUSE, ReplayResult, step_cause
from recycle.sim.replay.shared_layers import layer_steps

MOST_ITERATIONS = 1000
MOST_OPS = 20_000_000
_MOST_FACTOR = 1000.0
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Conditions:
    """Noise and mode of a replay. The default has no noise, and starts no op before its planned start.

    Args:
        num_iterations: Number of iterations in a row, from 1 to 1000.
        jitter: Standard deviation of an op's duration, as a share of it from 0 to 1.
        slow: Factor by worker: all ops of the worker take so many times as long.
        contention: Give each worker one link out and one link in, on which messages wait for each other.
        eager: Start every op as soon as it is ready, and not when the plan says.
        seed: Seed of the jitter.

    Raises:
        UserError: A value is outside its range.

    Example:
        >>> import recycle
        >>> recycle.Conditions(num_iterations=20, jitter=0.05, slow={recycle.Worker(0, 1): 1.3}, eager=True).jitter
        0.05
    """

    num_iterations: int = 5
    jitter: float = 0.0
    slow: Mapping[Worker, float] = field(default_factory=dict)
    contention: bool = False
    eager: bool = False
    seed: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_iterations <= MOST_ITERATIONS:
            raise UserError(f"{self.num_iterations} iterations cannot be replayed: give from 1 to {MOST_ITERATIONS}")
        if not 0 <= self.jitter <= 1:
            raise UserError(f"a jitter of {100 * self.jitter:g}% cannot be replayed: give from 0% to 100%")
        for worker, factor in self.slow.items():
            if not 0 < factor <= _MOST_FACTOR:
                raise UserError(f"{worker} cannot take {factor:g} times as long: give a factor above 0, up to {_MOST_FACTOR:g}")
        if self.seed < 0:
            raise UserError(f"the seed is {self.seed}, but it must be a whole number of at least 0")


def replay(plan: Plan, conditions: Conditions | None = None, progress: Progress | None = None) -> ReplayResult:
    """Simulate `plan` for several iterations, op by op.

    Args:
        plan: The plan. A legal plan without noise takes exactly its period in every iteration.
        conditions: Number of iterations, noise and mode; the default is `Conditions()`.
        progress: Called now and then with the number of ops that were simulated since the last call.

    Returns:
        The start and the end of every op, reduction and step, and from them `periods_us`, `steady_period_us` and `events()`.

    Raises:
        UserError: The plan cannot run at all, because an op is missing or misplaced or its rows wait for each other;
            `conditions` names a worker that is dead or unknown; or there are more than 20 million ops.

    Example:
        >>> import recycle
        >>> plan = recycle.solve(recycle.problem(2, 2, 3, fail="W1_1", costs=(3, 2, 1)))
        >>> recycle.replay(plan).steady_period_us == plan.period_us
        True
        >>> recycle.replay(plan, recycle.Conditions(slow={recycle.Worker(0, 0): 2.0})).steady_period_us > plan.period_us
        True
    """
    conditions = conditions or Conditions()
    _refuse_unknown_workers(plan, conditions)
    if plan.num_ops * conditions.num_iterations > MOST_OPS:
        raise UserError(
            f"{conditions.num_iterations} iterations of {plan.num_ops} ops are more than can be replayed: "
            f"their product must be at most {MOST_OPS}; give at most --iterations {max(1, MOST_OPS // plan.num_ops)}"
        )
    try:
        return replay_graph(build_op_graph(plan), conditions, progress)
    except OverflowError:
        raise UserError("the times of this replay exceed 64 bits of µs: use smaller costs or factors") from None


def replay_graph(graph: OpGraph, conditions: Conditions, progress: Progress | None = None) -> ReplayResult:
    """Simulate an op graph, whose ops may have other durations than those of the plan."""
    return _Simulation(graph, conditions, progress or (lambda _: None)).run()


def _refuse_unknown_workers(plan: Plan, conditions: Conditions) -> None:
    for worker in conditions.slow:
        if worker not in plan.problem.shape:
            raise UserError(f"{worker} is not a worker of this plan: {plan.problem.shape.ranges}")
        if not plan.problem.cluster.is_live(worker):
            raise UserError(f"{worker} is dead in this plan, so it cannot be slow: name a live worker")


class _Simulation:
    """The state of one replay. An op of an iteration has one number, `iteration * num_ops + op`; only ends of ops are events.

    By op, `ready` is when the last of its known dependencies ended, `missing` the number of dependencies that are still open, and
    `ends` its duration until the op starts.
    """

    def __init__(self, graph: OpGraph, conditions: Conditions, progress: Progress) -> None:
        problem, num, times = graph.problem, graph.num_ops, conditions.num_iterations
        self.graph, self.conditions, self.progress = graph, conditions, progress
        self.now_us = 0
        # Pending ends as (time, row, op). A row has one at a time, so that no two are equal and runs are reproducible.
        self.pending: list[tuple[int, int, int]] = []
        self.durations = disturbed_durations_us(graph, times, conditions.jitter, dict(conditions.slow), conditions.seed)
        self.ready, self.causes = array("q", bytes(8 * num * times)), array("q", bytes(8 * num * times))
        self.ends = array("q", self.durations.tobytes())
        waits = np.ones(num, dtype=np.uint8)
        waits[graph.targets[graph.targets != ABSENT]] += 1
        self.layer_steps = layer_steps(graph)
        self.layers_left = [[len(layer.last_ops) for layer in self.layer_steps] for _ in range(times)]
        self.closes: dict[int, list[int]] = {}
        for number, layer in enumerate(self.layer_steps):
            for op in layer.last_ops:
                self.closes.setdefault(op, []).append(number)
        every = np.tile(waits, (times, 1))
        for layer in self.layer_steps:
            every[1:, list(layer.first_ops)] += 1
        self.missing = bytearray(every.tobytes())
        self.rows, self.stages = graph.row_of.tolist(), graph.stage_of.tolist()
        self.planned = [0] * num if conditions.eager else graph.planned_us.tolist()
        self.num_ops, self.period_us = num, 0 if conditions.eager else graph.plan.period_us
        self.num_stages = problem.shape.num_stages
        self.first_ops = [graph.first_ops(stage) for stage in range(self.num_stages)]
        self.reduce_us = [problem.reduce_us(stage) for stage in range(self.num_stages)]
        self.step_us = [problem.optimizer_us(stage) for stage in range(self.num_stages)]
        self.rows_left = [len(firsts) for firsts in self.first_ops] * times
        self.reduces = np.zeros((3, times, self.num_stages), dtype=np.int64)
        self.steps = np.zeros((3, times, self.num_stages), dtype=np.int64)
        self.out_free, self.in_free = [0] * len(graph.plan.rows), [0] * len(graph.plan.rows)

    def run(self) -> ReplayResult:
        for stage, (first, _) in enumerate(stage_windows(self.graph.plan)):
            self._release(0, stage, first, NO_CAUSE)
        self._handle_events()
        if any(self.missing):
            raise self._deadlock()
        shape = self.conditions.num_iterations, self.num_ops
        ready, ends, causes = (_matrix(column, shape) for column in (self.ready, self.ends, self.causes))
        return ReplayResult(self.graph, ready, ends - self.durations, ends, causes, *self.reduces, *self.steps)

    def _handle_events(self) -> None:
        """Handle the end of each op in order of time, a dependency of the next op in its row and of its target."""
        targets, lags, num = self.graph.targets.tolist(), self.graph.lags_us.tolist(), self.num_ops
        is_last = (np.diff(self.graph.row_of, append=-1) != 0).tolist()
        contention = self.conditions.contention
        while self.pending:
            now, source, at = heappop(self.pending)
            self.now_us, op = now, at % num
            target = targets[op]
            if target >= 0:
                arrival = self._send(source, self.rows[target], lags[op]) if contention else now + lags[op]
                self._dependency_ended(at - op + target, arrival, at)
            if op in self.closes:
                self._end_layers(at, op)
            if is_last[op]:
                self._end_row(at, op)
            else:
                self._dependency_ended(at + 1, now, at)

    def _dependency_ended(self, at: int, ready_us: int, cause: int) -> None:
        """Note that a dependency of an op ended at `ready_us`; the op starts when its last one has."""
        start = self.ready[at]
        if ready_us >= start:
            start = self.ready[at] = ready_us
            self.causes[at] = cause
        left = self.missing[at] - 1
        self.missing[at] = left
        if left:
            return
        iteration, op = divmod(at, self.num_ops)
        due = self.planned[op] + iteration * self.period_us
        if due > start:
            start = due
        end = self.ends[at] = self.ends[at] + start
        heappush(self.pending, (end, self.rows[op], at))

    def _send(self, source: int, target: int, lag: int) -> int:
        """Return when a message that is sent now arrives, if it must wait for both of its links."""
        latency = self.graph.problem.profile.stage_link.latency_us
        free = max(self.now_us, self.out_free[source], self.in_free[target]) + lag - latency
        self.out_free[source] = self.in_free[target] = free
        return free + latency

    def _end_layers(self, at: int, op: int) -> None:
        """Count a row as done with the layers that it used last with `op`; the last of them lets the layer step."""
        iteration = at // self.num_ops
        for number in self.closes[op]:
            self.layers_left[iteration][number] -= 1
            if self.layers_left[iteration][number] == 0 and iteration + 1 < self.conditions.num_iterations:
                layer = self.layer_steps[number]
                for first in layer.first_ops:
                    cause = step_cause(self.stages[op])
                    self._dependency_ended((iteration + 1) * self.num_ops + first, self.now_us + layer.finish_us, cause)

    def _end_row(self, at: int, op: int) -> None:
        iteration, stage = at // self.num_ops, self.stages[op]
        row = self.rows[op]
        self.progress(int(self.graph.bounds[row + 1] - self.graph.bounds[row]))
        self.rows_left[iteration * self.num_stages + stage] -= 1
        if self.rows_left[iteration * self.num_stages + stage]:
            return
        self.reduces[:, iteration, stage] = self.now_us, self.now_us + self.reduce_us[stage], op
        if self.graph.problem.techniques.staggered:
            self._step(iteration, stage, stage)
            self._release(iteration + 1, stage, int(self.steps[1, iteration, stage]), step_cause(stage))
        elif not any(self.rows_left[iteration * self.num_stages : (iteration + 1) * self.num_stages]):
            self._step_together(iteration)

    def _step_together(self, iteration: int) -> None:
        last = int(self.reduces[1, iteration].argmax())
        for stage in range(self.num_stages):
            self._step(iteration, stage, last)
        longest = int(self.steps[1, iteration].argmax())
        for stage in range(self.num_stages):
            self._release(iteration + 1, stage, int(self.steps[1, iteration, longest]), step_cause(longest))

    def _step(self, iteration: int, stage: int, awaited: int) -> None:
        """Let `stage` step when the reduction of `awaited` has ended."""
        start = int(self.reduces[1, iteration, awaited])
        self.steps[:, iteration, stage] = start, start + self.step_us[stage], awaited

    def _release(self, iteration: int, stage: int, ready_us: int, cause: int) -> None:
        if iteration < self.conditions.num_iterations:
            for op in self.first_ops[stage]:
                self._dependency_ended(iteration * self.num_ops + op, ready_us, cause)

    def _deadlock(self) -> UserError:
        at = next(at for at, num in enumerate(self.missing) if num) % self.num_ops
        worker = self.graph.plan.rows[self.rows[at]].worker
        return UserError(
            f"this plan cannot be replayed: {worker} waits for ever to start {self.graph.op(at)}, "
            "because rows wait for each other; recycle check lists every rule that it breaks"
        )


def _matrix(column: "array[int]", shape: tuple[int, int]) -> Ints:
    return np.frombuffer(column, dtype=np.int64).reshape(shape)
