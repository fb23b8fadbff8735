"""Replay: a plan played for several iterations in a row, op by op and to the microsecond, without processes.

It is a second opinion on a plan: it asks `rules` what waits for what, but never when anything ends. What is true of it:

- Every worker plays its row in order, iteration after iteration. An op starts when its worker is free and everything that
  `rules.needs` asks for has ended and arrived. A message takes `rules.lag_us`, beside any computation; with `contention`,
  each worker has one link out to other stages and one in from them, and a message holds both of them for its bytes
  over the bandwidth (not for the latency), in the order in which messages are sent.
- When the last op of a stage has ended, over all its live workers, their reduction begins, and after it the step. Staggered, the
  stage then starts its next iteration by itself. Synchronous, all stages step when the last reduction has ended, and the next
  iteration starts when the longest step has.
- Pace: no op starts before the time that the plan gives it, counted from `iteration * period`. So a legal plan is played exactly
  as it is written, and every iteration takes exactly its period; an illegal one is late where it asks for too much.
- Eager: rows alone drive, as they do in the runtime. Only in the first iteration a stage waits for its planned start, as if it
  came from the iteration before. So without noise no step is later than planned, and none is more than a period P after the one
  before it: what starts everywhere at most P later than the last time is, by the same waits, ready again at most P later.
- Jitter multiplies the duration of each op by 1 + jitter * z, with z normal and cut off at 3 deviations; `slow` multiplies those
  of a worker. Reductions and steps take what the profile says.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import stage_windows
from recycle.sim.replay.event_queue import EventQueue
from recycle.sim.replay.jitter import durations_us
from recycle.sim.replay.op_graph import ABSENT, Ints, OpGraph, compile_plan
from recycle.sim.replay.replay_result import NOTHING, Replay, step_cause

MOST_ITERATIONS = 1000
MOST_OPS = 20_000_000
_MOST_FACTOR = 1000.0
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under what a plan is played. The default is the plan's own world."""

    num_iterations: int = 5
    jitter: float = 0.0
    slow: Mapping[Worker, float] = field(default_factory=dict)
    contention: bool = False
    eager: bool = False
    seed: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_iterations <= MOST_ITERATIONS:
            raise UserError(f"{self.num_iterations} iterations cannot be played: give from 1 to {MOST_ITERATIONS}")
        if not 0 <= self.jitter <= 1:
            raise UserError(f"a jitter of {100 * self.jitter:g}% cannot be played: give from 0% to 100%")
        for worker, factor in self.slow.items():
            if not 0 < factor <= _MOST_FACTOR:
                raise UserError(f"{worker} cannot take {factor:g} times as long: give a factor above 0, up to {_MOST_FACTOR:g}")
        if self.seed < 0:
            raise UserError(f"the seed is {self.seed}, but it must be a whole number of at least 0")

    def eagerly(self) -> "Conditions":
        """The same conditions, where rows alone drive."""
        return replace(self, eager=True)


def replay(plan: Plan, conditions: Conditions | None = None, progress: Progress | None = None) -> Replay:
    """Play `plan` and return all that happened; `progress` is told now and then how many more ops were played."""
    chosen = conditions or Conditions()
    _refuse_unknown_workers(plan, chosen)
    if plan.num_ops * chosen.num_iterations > MOST_OPS:
        raise UserError(
            f"{chosen.num_iterations} iterations of {plan.num_ops} ops are more than can be played: "
            f"their product must be at most {MOST_OPS}; give at most --iterations {max(1, MOST_OPS // plan.num_ops)}"
        )
    try:
        return replay_program(compile_plan(plan), chosen, progress)
    except OverflowError:
        raise UserError("the times of this replay outgrow the clock, 64 bits of µs: use smaller costs or factors") from None


def replay_program(program: OpGraph, conditions: Conditions, progress: Progress | None = None) -> Replay:
    """Play a plan that is compiled; its ops may take other times than the plan says."""
    return _Player(program, conditions, progress or (lambda _: None)).play()


def _refuse_unknown_workers(plan: Plan, conditions: Conditions) -> None:
    shape = plan.problem.shape
    for worker in conditions.slow:
        if worker.pipeline >= shape.num_pipelines or worker.stage >= shape.num_stages:
            raise UserError(
                f"{worker} is not a worker of this plan: pipelines are 0 to {shape.num_pipelines - 1}, "
                f"stages 0 to {shape.num_stages - 1}"
            )
        if not plan.problem.cluster.is_live(worker):
            raise UserError(f"{worker} is dead in this plan, so it cannot be slow: name a live worker")


class _Player:
    """The state of one replay. An op of an iteration is one number, `iteration * num_ops + op`; only ends of ops are events.

    `ready` holds when all is there that an op waits for, as far as it is known, `missing` how many of these things have yet to
    happen; `ends` holds its duration until it starts.
    """

    def __init__(self, program: OpGraph, conditions: Conditions, progress: Progress) -> None:
        problem, num, times = program.problem, program.num_ops, conditions.num_iterations
        self.program, self.conditions, self.progress = program, conditions, progress
        self.clock: EventQueue[int] = EventQueue()
        self.durations = durations_us(program, times, conditions.jitter, dict(conditions.slow), conditions.seed)
        self.ready, self.causes = array("q", bytes(8 * num * times)), array("q", bytes(8 * num * times))
        self.ends = array("q", self.durations.tobytes())
        waits = np.ones(num, dtype=np.uint8)
        waits[program.targets[program.targets != ABSENT]] += 1
        self.missing = bytearray(np.tile(waits, times).tobytes())
        self.rows, self.stages = program.row_of.tolist(), program.stage_of.tolist()
        self.planned = [0] * num if conditions.eager else program.planned_us.tolist()
        self.num_ops, self.period_us = num, 0 if conditions.eager else program.plan.period_us
        self.num_stages = problem.shape.num_stages
        self.first_ops = [_first_ops(program, stage) for stage in range(self.num_stages)]
        self.reduce_us = [problem.reduce_us(stage) for stage in range(self.num_stages)]
        self.step_us = [stage.optimizer_us for stage in problem.profile.stages]
        self.rows_left = [len(firsts) for firsts in self.first_ops] * times
        self.reduces = np.zeros((3, times, self.num_stages), dtype=np.int64)
        self.steps = np.zeros((3, times, self.num_stages), dtype=np.int64)
        self.out_free, self.in_free = [0] * len(program.plan.rows), [0] * len(program.plan.rows)

    def play(self) -> Replay:
        for stage, (first, _) in enumerate(stage_windows(self.program.plan)):
            self._release(0, stage, first, NOTHING)
        self._run()
        if any(self.missing):
            raise self._deadlock()
        shape = self.conditions.num_iterations, self.num_ops
        ready, ends, causes = (_matrix(column, shape) for column in (self.ready, self.ends, self.causes))
        return Replay(self.program, ready, ends - self.durations, ends, causes, *self.reduces, *self.steps)

    def _run(self) -> None:
        """Take the ends of ops as they come, and set free what waited for each: the next in the row, and who gets its message."""
        clock, num = self.clock, self.num_ops
        targets, lags, rows = self.program.targets.tolist(), self.program.lags_us.tolist(), self.rows
        is_last = bytearray(num)
        for row, last in zip(self.program.plan.rows, self.program.bounds[1:].tolist(), strict=True):
            if row.kinds:
                is_last[last - 1] = 1
        contention = self.conditions.contention
        while clock:
            at = clock.next()
            now, op = clock.now_us, at % num
            target = targets[op]
            if target >= 0:
                arrival = self._send(rows[op], rows[target], lags[op]) if contention else now + lags[op]
                self._happened(at - op + target, arrival, at)
            if is_last[op]:
                self._end_row(at, op)
            else:
                self._happened(at + 1, now, at)

    def _happened(self, at: int, ready_us: int, cause: int) -> None:
        """One of the things that an op waits for is there at `ready_us`; the last one lets it start."""
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
        self.clock.at(end, at, self.rows[op])

    def _send(self, source: int, target: int, lag: int) -> int:
        """Return when a message that is sent now arrives, if it must wait for both of its links."""
        latency = self.program.problem.profile.stage_link.latency_us
        free = max(self.clock.now_us, self.out_free[source], self.in_free[target]) + lag - latency
        self.out_free[source] = self.in_free[target] = free
        return free + latency

    def _end_row(self, at: int, op: int) -> None:
        iteration, stage = at // self.num_ops, self.stages[op]
        row = self.rows[op]
        self.progress(int(self.program.bounds[row + 1] - self.program.bounds[row]))
        self.rows_left[iteration * self.num_stages + stage] -= 1
        if self.rows_left[iteration * self.num_stages + stage]:
            return
        now = self.clock.now_us
        self.reduces[:, iteration, stage] = now, now + self.reduce_us[stage], at % self.num_ops
        if self.program.problem.techniques.staggered:
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
                self._happened(iteration * self.num_ops + op, ready_us, cause)

    def _deadlock(self) -> UserError:
        at = next(at for at, num in enumerate(self.missing) if num) % self.num_ops
        worker = self.program.plan.rows[self.rows[at]].worker
        return UserError(
            f"this plan cannot be played: {worker} waits for ever to start {self.program.op(at)}, "
            "because rows wait for each other; recycle check lists every rule that it breaks"
        )


def _first_ops(program: OpGraph, stage: int) -> list[int]:
    return [int(program.bounds[row]) for row in program.rows_of_stage(stage) if program.plan.rows[row].kinds]


def _matrix(column: "array[int]", shape: tuple[int, int]) -> Ints:
    return np.frombuffer(column, dtype=np.int64).reshape(shape)
