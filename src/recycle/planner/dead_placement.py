"""spread_failures(): where a number of dead workers costs least when neighbouring stages share layers.

Failure Normalization looks at each stage alone. With shared layers work flows from stage to stage, but only so many layers across
each boundary: dead workers are best far apart. So they are placed one after another, each where the load bound stays lowest, and
then exchanged between stages as long as that lowers it.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from recycle.core.plans.library import without_failures
from recycle.core.problem import Problem
from recycle.planner.failure_normalization import Distribution
from recycle.planner.model.load_split import WorkLine, work_line

Floats = npt.NDArray[np.float64]
_MOST_STAGES = 16  # with more of them, dead workers are far apart anyway, and each exchange takes longer to look at


def spread_failures(problem: Problem, num_failures: int) -> Distribution:
    """Return how many of the dead workers each stage has; every stage keeps a live one."""
    line = work_line(without_failures(problem))
    dead, most = [0] * problem.shape.num_stages, problem.shape.num_pipelines - 1
    for _ in range(num_failures):
        stages, times = [stage for stage, num in enumerate(dead) if num < most], _times_with_one_less_us(line)
        best = min(stages, key=lambda stage: (times[stage], dead[stage], -_distance(dead, stage), stage))
        dead[best] += 1
        line = _with_one(line, best, -1)
    if len(dead) <= _MOST_STAGES:
        _improve(dead, most, line)
    return tuple(dead)


def _improve(dead: list[int], most: int, line: WorkLine) -> None:
    """Move dead workers from stage to stage, one at a time, as long as that lowers the bound."""
    pairs = [(source, target) for source in range(len(dead)) for target in range(len(dead)) if source != target]
    is_better = True
    while is_better:
        is_better = False
        for source, target in pairs:
            if dead[source] and dead[target] < most:
                moved = _with_one(_with_one(line, source, 1), target, -1)
                if least_time_us(moved) < least_time_us(line) * (1 - 1e-9):
                    dead[source] -= 1
                    dead[target] += 1
                    line, is_better = moved, True


def least_time_us(line: WorkLine) -> float:
    """The least time in which all stages can do their work, however it is split.

    For a run of stages, the work that cannot be moved to other stages, over their speed: the highest value over all runs.
    """
    best, num_stages = 0.0, len(line.speeds)
    for first in range(num_stages):
        speed = 0.0
        for last in range(first, num_stages):
            speed += line.speeds[last]
            stuck = line.work_us[line.lows[last + 1]] - line.work_us[line.highs[first]]
            best = max(best, stuck / speed)
    return best


def _with_one(line: WorkLine, stage: int, change: int) -> WorkLine:
    """The line with so many live workers more at a stage."""
    return replace(line, speeds=(*line.speeds[:stage], line.speeds[stage] + change, *line.speeds[stage + 1 :]))


def _times_with_one_less_us(line: WorkLine) -> list[int]:
    """For each stage the least time if one more of its workers is dead.

    A run of stages that has this stage then has one worker less, all others are as before.
    """
    num_stages = len(line.speeds)
    speed = np.concatenate([[0.0], np.cumsum(line.speeds)])
    work: Floats = np.array(line.work_us, dtype=np.float64)
    stuck = np.maximum(0.0, work[list(line.lows[1:])][None, :] - work[list(line.highs[:-1])][:, None])
    speeds = np.where(np.tri(num_stages, dtype=bool).T, speed[None, 1:] - speed[:-1, None], np.inf)
    as_before, with_one_less = stuck / speeds, stuck / np.maximum(speeds - 1, 1e-9)
    times = []
    for stage in range(num_stages):
        parts = as_before[:stage, :stage], with_one_less[: stage + 1, stage:], as_before[stage + 1 :, stage + 1 :]
        times.append(round(max(float(part.max(initial=0.0)) for part in parts)))
    return times


def _distance(dead: list[int], stage: int) -> int:
    """The number of stages to the nearest one with a dead worker; the ends of the pipeline count as half as near."""
    others = [abs(stage - other) for other, num in enumerate(dead) if num]
    return min([*others, 2 * stage + 1, 2 * (len(dead) - 1 - stage) + 1])
