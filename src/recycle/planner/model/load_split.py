"""The load split: how much of the model each stage computes, so that the most loaded worker has as little as possible.

The work of a micro-batch is a line from 0 to its whole work, and a cut is a point on it. Each boundary between two stages may lie
anywhere between the first and the last cut that shared layers allow. Stages follow one another along the line, each with the sum
of its live workers' speeds. So the best split is the taut string through the boundaries' intervals, drawn over the speeds: no
other path through them has a lower highest slope, and the slope at a stage is the time that its workers need. docs/planner.md has
the proof.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from recycle.core.layer_sums import LayerSums
from recycle.core.problem import Problem
from recycle.planner.model.assignment import speeds_of

_TIMES = ("forward_us", "input_us", "weight_us", "fused_us")


@dataclass(frozen=True, slots=True)
class WorkLine:
    """The work of all chains along the layers, the speed of each stage, and the time in an iteration that is not work.

    Args:
        work_us: The work of all chains on the layers before each layer, and on all of them last.
        lows, highs: The first and the last layer at which a chain may be cut, by boundary; 0 and the last layer at the ends.
        speeds: The sum of the speeds of the live workers of each stage.
        lost_us: The time that every worker of a stage is idle in each iteration at least, by stage.
    """

    work_us: tuple[int, ...]
    lows: tuple[int, ...]
    highs: tuple[int, ...]
    speeds: tuple[float, ...]
    lost_us: tuple[float, ...]


def work_line(problem: Problem, lost_us: Sequence[float] | None = None) -> WorkLine:
    """Return the work of a problem whose layers are known."""
    held = problem.held_layers
    assert held is not None
    sums, num_chains = held.sums, problem.shape.num_chains
    work = tuple(num_chains * at for at in layer_work(problem, sums.num_layers))
    inner = sums.bounds[1:-1]
    lows = (0, *(bound - held.num_shared for bound in inner), sums.num_layers)
    highs = (0, *(bound + held.num_shared for bound in inner), sums.num_layers)
    speeds = tuple(float(row.sum()) for row in speeds_of(problem))
    return WorkLine(work, lows, highs, speeds, tuple(lost_us or (0.0,) * len(speeds)))


def layer_work(problem: Problem, num_layers: int) -> tuple[int, ...]:
    """The least work of one chain on the layers before each layer, and on all of them last; unknown layers are whole stages."""
    if problem.held_layers is not None:
        return work_of_layers(problem.held_layers.sums, problem.techniques.decoupled)
    times = ([getattr(stage, name) for name in _TIMES] for stage in problem.profile.stages[:num_layers])
    return (0, *accumulate(_work(each, problem.techniques.decoupled) for each in times))


def work_of_layers(sums: LayerSums, is_decoupled: bool) -> tuple[int, ...]:
    """The least work of one chain on the layers before each layer, and on all of them last; backward passes may be split."""
    times = ([sums.total(name, range(layer, layer + 1)) for name in _TIMES] for layer in range(sums.num_layers))
    return (0, *accumulate(_work(each, is_decoupled) for each in times))


def _work(times: Sequence[int], is_decoupled: bool) -> int:
    forward, split, weight, fused = times
    return forward + (min(split + weight, fused) if is_decoupled else fused)


def fits(line: WorkLine, room_us: Sequence[float]) -> bool:
    """Whether all work can be split so that no stage has more than its `room_us`.

    Each stage in turn takes as much as it can, but not beyond the last cut that the next boundary allows. No other split gets
    further at any boundary.
    """
    done = 0.0
    for stage, room in enumerate(room_us, start=1):
        done = min(done + room, line.work_us[line.highs[stage]])
        if done < line.work_us[line.lows[stage]] - 1e-6:
            return False
    return True


def split_points_us(line: WorkLine) -> list[float]:
    """The boundaries on the line of work, as the taut string has them: the first is 0, the last the whole work."""
    num_stages = len(line.speeds)
    speed, lost = [0.0], [0.0]
    for one, idle in zip(line.speeds, line.lost_us, strict=True):
        speed.append(speed[-1] + one)
        lost.append(lost[-1] + one * idle)
    low = [line.work_us[layer] + more for layer, more in zip(line.lows, lost, strict=True)]
    high = [line.work_us[layer] + more for layer, more in zip(line.highs, lost, strict=True)]
    points = [0.0]
    at = 0
    while at < num_stages:
        at = _stretch(speed, low, high, points, at)
    return [point - more for point, more in zip(points, lost, strict=True)]


def _stretch(speed: list[float], low: list[float], high: list[float], points: list[float], at: int) -> int:
    """Draw the string straight from the last point to the next bend, or to the end; return the boundary there."""
    steepest, flattest, above, below = float("inf"), float("-inf"), at, at
    for to in range(at + 1, len(speed)):
        length = speed[to] - speed[at]
        least, most = (low[to] - points[at]) / length, (high[to] - points[at]) / length
        bend, slope = (below, flattest) if most < flattest else (above, steepest) if least > steepest else (0, 0.0)
        if bend:
            points += [points[at] + slope * (speed[each] - speed[at]) for each in range(at + 1, bend + 1)]
            return bend
        if least >= flattest:
            flattest, below = least, to
        if most <= steepest:
            steepest, above = most, to
    end = len(speed) - 1
    slope = (low[end] - points[at]) / (speed[end] - speed[at])
    points += [points[at] + slope * (speed[each] - speed[at]) for each in range(at + 1, end + 1)]
    return end
