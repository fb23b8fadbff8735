"""choose_shared_layers(): how many layers neighbouring stages should share, by memory and by what is kept when one worker dies.

For each number from 0 up, plans are made with nobody dead and with one worker dead, at a few stages in turn. A number is refused
if a worker could not hold the layers. Of the others, the smallest is chosen whose mean of the two periods is about the least:
sharing has a price with nobody dead, because more gradients are summed and stepped, and pays when a worker is dead.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean

from recycle.core.cluster import Cluster, Worker
from recycle.core.errors import MemoryTooSmall, UserError
from recycle.core.plans.memory_use import memory_use
from recycle.core.problem import MOST_SHARED_LAYERS, Problem
from recycle.core.units import count_text, format_bytes
from recycle.planner.model.lower_bound import lower_bound
from recycle.planner.solve import solve

AUTO = "auto"
# A mean period is about the least if it is at most this share longer.
_ABOUT = 0.01
# At least these are tried; a larger one only if the one before it was better than all smaller ones.
_ALWAYS_TRIED = 2
# Deaths are planned at so many stages, evenly spaced. A plan has the effort of this many placed ops, and of this many runs of the
# list scheduler: tenths of a second.
_MOST_DEATHS, _MOST_PLACED, _MOST_RUNS = 4, 600_000, 200
# Beyond so many ops a plan takes seconds. Its proven bound, which plans come within a few per cent of, is known at once.
_MOST_PLANNED_OPS = 60_000


@dataclass(frozen=True, slots=True)
class SharedLayersOption:
    """A number of shared layers: the periods with nobody dead and with one dead, and the most memory of any worker.

    `guest_bytes` is the largest part of it that layers of neighbours take. Bytes are 0 if the profile does not know them.
    """

    num: int
    fault_free_us: int
    one_dead_us: tuple[int, ...]
    guest_bytes: int
    most_bytes: int

    @property
    def mean_dead_us(self) -> float:
        """The mean period with one worker dead, or with nobody dead if no death can be planned for."""
        return fmean(self.one_dead_us) if self.one_dead_us else float(self.fault_free_us)

    @property
    def mean_us(self) -> float:
        """The mean period of a run in which half of the time a worker is dead."""
        return (self.fault_free_us + self.mean_dead_us) / 2


@dataclass(frozen=True, slots=True)
class SharedLayersChoice:
    """The number of layers that was chosen, the numbers that were tried, and the first one that was too much for the memory."""

    num: int
    options: tuple[SharedLayersOption, ...]
    too_large: int | None = None
    limit_bytes: int | None = None

    @property
    def chosen(self) -> SharedLayersOption:
        return next(option for option in self.options if option.num == self.num)

    def sentence(self) -> str:
        """What was chosen and why, in one line; throughputs are shares of the best one with nobody dead."""
        chosen, others = self.chosen, [option for option in self.options if option.num != self.num]
        best_us = min(option.fault_free_us for option in self.options)
        shares = [f"{best_us / chosen.mean_dead_us:.1%} with one worker dead"] if chosen.one_dead_us else []
        shares.append(f"{best_us / chosen.fault_free_us:.1%} with nobody dead")
        why = f"of the best throughput they have {' and '.join(shares)}"
        if others:
            why += f" ({'; '.join(self._compared(option, best_us) for option in others)})"
        limit = f" of {format_bytes(self.limit_bytes)}" if self.limit_bytes else ""
        if chosen.most_bytes:
            why += f"; a worker needs at most {format_bytes(chosen.most_bytes)}{limit}"
            why += f", up to {format_bytes(chosen.guest_bytes)} of it for shared layers" if self.num else ""
        if self.too_large is not None:
            why += f"; {self.too_large} would not fit into its memory"
        return f"neighbouring stages share {_layers(self.num)}: {why}"

    @staticmethod
    def _compared(option: SharedLayersOption, best_us: int) -> str:
        shares = [best_us / option.mean_dead_us] if option.one_dead_us else []
        shares.append(best_us / option.fault_free_us)
        return f"{_layers(option.num)}: {', '.join(f'{share:.1%}' for share in shares)}"


def _layers(num: int) -> str:
    return count_text(num, "layer") if num else "no layers"


def choose_shared_layers(problem: Problem, limit_bytes: int | None = None) -> SharedLayersChoice:
    """Return how many layers the stages of `problem` should share; its own number and its dead workers do not count.

    Args:
        problem: The problem, whose profile knows its layers.
        limit_bytes: The memory of a worker, if `problem` has no limit in bytes; by default the device memory of the profile.

    Raises:
        UserError: The profile does not know its layers.
    """
    if not problem.profile.layers:
        raise UserError(
            "how many layers to share cannot be chosen, because nothing says how many layers a stage has: give --layers, or a "
            "profile with layers"
        )
    whole = replace(problem, cluster=Cluster(problem.shape), shared_layers=0)
    limit_bytes = limit_bytes or problem.profile.device_bytes
    if problem.memory.unit == "bytes":
        limit_bytes = min(problem.memory.limits)
    most = min(MOST_SHARED_LAYERS, *map(len, problem.profile.layers)) if problem.shape.num_stages > 1 else 0
    options: list[SharedLayersOption] = []
    too_large = None
    for num in range(most + 1):
        option = _option(whole, num)
        if option is None or (num and limit_bytes is not None and option.most_bytes > limit_bytes):
            too_large = num
            break
        is_better = not options or option.mean_us < (1 - _ABOUT) * min(known.mean_us for known in options)
        options.append(option)
        if num >= _ALWAYS_TRIED and not is_better:
            break
    least_us = min(option.mean_us for option in options)
    best = next(option for option in options if option.mean_us <= (1 + _ABOUT) * least_us)
    return SharedLayersChoice(best.num, tuple(options), too_large, limit_bytes)


def _option(whole: Problem, num: int) -> SharedLayersOption | None:
    """Plan with so many shared layers; None if a worker cannot hold them."""
    try:
        problem = replace(whole, shared_layers=num)
    except MemoryTooSmall:
        return None
    shape, stages = whole.shape, whole.profile.stages
    guests = max(problem.static_bytes(stage) - own.static_bytes for stage, own in enumerate(stages))
    deaths = [replace(problem, cluster=cluster) for cluster in _deaths(problem)]
    num_ops = 3 * shape.num_stages * shape.num_chains
    if num_ops > _MOST_PLANNED_OPS:
        # As many micro-batches are in flight as in 1F1B, or more.
        in_flight = [min(shape.num_microbatches, shape.num_stages - stage) for stage in range(shape.num_stages)]
        sizes = zip(map(problem.static_bytes, range(shape.num_stages)), in_flight, stages, strict=True)
        most = max(static + number * own.activation_bytes for static, number, own in sizes)
        return SharedLayersOption(num, lower_bound(problem), tuple(map(lower_bound, deaths)), guests, most)
    effort = min(_MOST_PLACED, _MOST_RUNS * num_ops)
    fault_free, *dead = (solve(each, "greedy", effort=effort) for each in (problem, *deaths))
    most = max(used.total_bytes for plan in (fault_free, *dead) for used in memory_use(plan).values())
    return SharedLayersOption(num, fault_free.period_us, tuple(plan.period_us for plan in dead), guests, most)


def _deaths(problem: Problem) -> Iterator[Cluster]:
    """The cluster with one worker dead, at evenly spaced stages; none if its peers cannot take over."""
    shape = problem.shape
    if shape.num_pipelines < 2 or not problem.techniques.adaptive:
        return
    num = min(_MOST_DEATHS, shape.num_stages)
    stages = {round(index * (shape.num_stages - 1) / max(1, num - 1)) for index in range(num)}
    for stage in sorted(stages):
        yield Cluster.of(shape, [Worker(0, stage)])
