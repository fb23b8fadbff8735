"""What a replay says of a plan: where the time of each worker went, and what it held in memory."""

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from recycle.core.cluster import Worker
from recycle.core.problem import Memory, Problem
from recycle.sim.replay.op_graph import KINDS, Ints
from recycle.sim.replay.replay_result import Replay

_PLENTY_BYTES = 10**15


@dataclass(frozen=True, slots=True)
class TimeShares:
    """The time of one worker over all its windows; the four parts make up the whole."""

    worker: Worker
    busy_us: int
    bubble_us: int
    reduce_us: int
    optimizer_us: int

    @property
    def span_us(self) -> int:
        return self.busy_us + self.bubble_us + self.reduce_us + self.optimizer_us

    @property
    def bubble(self) -> float:
        return float(Fraction(self.bubble_us, self.span_us))


def windows_us(played: Replay) -> Ints:
    """Return by iteration and stage when the iteration starts there, and when the next one does.

    After the last iteration there is no next one: it is taken to start a period later, or when the stage has stepped if
    that is later.
    """
    problem = played.problem
    firsts = np.stack([_first_starts(played, stage) for stage in range(problem.shape.num_stages)], axis=1)
    stepped = played.step_ends_us[-1]
    if not problem.techniques.staggered:
        firsts = np.repeat(firsts.min(axis=1, keepdims=True), firsts.shape[1], axis=1)
        stepped = np.full_like(stepped, stepped.max())
    last = np.maximum(stepped, firsts[-1] + played.periods_us[-1])
    return np.stack([firsts, np.concatenate([firsts[1:], [last]])], axis=2)


def _first_starts(played: Replay, stage: int) -> Ints:
    program = played.program
    firsts = [program.bounds[row] for row in program.rows_of_stage(stage) if program.plan.rows[row].kinds]
    earliest: Ints = played.starts_us[:, firsts].min(axis=1)
    return earliest


def shares(played: Replay) -> list[TimeShares]:
    """Return for each live worker where its time went, from the start of its first window to the end of its last."""
    windows, bounds = windows_us(played), played.program.bounds
    reduced = (played.reduce_ends_us - played.reduce_starts_us).sum(axis=0)
    stepped = (played.step_ends_us - played.step_starts_us).sum(axis=0)
    made = []
    for number, row in enumerate(played.plan.rows):
        stage, ops = row.worker.stage, slice(bounds[number], bounds[number + 1])
        busy = int((played.ends_us[:, ops] - played.starts_us[:, ops]).sum())
        span = int(windows[-1, stage, 1] - windows[0, stage, 0])
        reduce_us, optimizer_us = int(reduced[stage]), int(stepped[stage])
        made.append(TimeShares(row.worker, busy, span - busy - reduce_us - optimizer_us, reduce_us, optimizer_us))
    return made


def counted(problem: Problem) -> Problem:
    """Return the same problem with memory in bytes, if its profile knows any; else in micro-batches."""
    stages = problem.profile.stages
    if any(stage.activation_bytes for stage in stages):
        return replace(problem, memory=Memory.bytes([_PLENTY_BYTES] * len(stages)))
    return replace(problem, memory=Memory.unlimited())


def memory_held(played: Replay, row: int, iteration: int) -> tuple[Ints, Ints]:
    """Return when what a worker holds changes in an iteration, and what it holds from then on, with its parameters and states."""
    program, problem = played.program, counted(played.problem)
    stage, ops = program.plan.rows[row].worker.stage, slice(program.bounds[row], program.bounds[row + 1])
    deltas = np.array([problem.memory_delta(stage, kind) for kind in KINDS], dtype=np.int64)[program.kinds[ops]]
    is_forward = program.kinds[ops] == 0
    times = np.where(is_forward, played.starts_us[iteration, ops], played.ends_us[iteration, ops])
    return times, _static(problem, stage) + np.cumsum(deltas)


def _static(problem: Problem, stage: int) -> int:
    return problem.profile.stages[stage].static_bytes if problem.memory.unit == "bytes" else 0


def peak_memory(played: Replay) -> tuple[str, list[int]]:
    """Return the unit, and for each stage the most that one of its workers holds at once.

    A worker holds what its row says, however late its ops are, so that one iteration tells the peak of all.
    """
    problem = counted(played.problem)
    peaks = [_static(problem, stage) for stage in range(problem.shape.num_stages)]
    for number, row in enumerate(played.plan.rows):
        if row.kinds:
            peaks[row.worker.stage] = max(peaks[row.worker.stage], int(memory_held(played, number, 0)[1].max()))
    return "bytes" if problem.memory.unit == "bytes" else "microbatches", peaks


def memory_curve(played: Replay, stage: int, iteration: int, num_columns: int) -> list[int]:
    """Return what the fullest worker of a stage holds in each of equal columns of the iteration, at its peak in that column."""
    first, last = windows_us(played)[iteration, stage].tolist()
    curve = np.full(num_columns, _static(counted(played.problem), stage), dtype=np.int64)
    for number in played.program.rows_of_stage(stage):
        times, held = memory_held(played, number, iteration)
        if len(times) == 0:
            continue
        columns = np.minimum((times - first) * num_columns // (last - first), num_columns - 1)
        np.maximum.at(curve, columns, held)
        # What is held stays held until the next change.
        after = np.searchsorted(columns, np.arange(num_columns), side="left") - 1
        np.maximum(curve, np.where(after >= 0, held[after], 0), out=curve)
    return [int(value) for value in curve]
