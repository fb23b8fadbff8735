"""IterationTimes: the period of an iteration by the number of dead workers, from the real planner, cached on disk.

Bisection between powers of two decides which plans are made, and never the content of the cache: the result does not depend on
earlier calls. docs/simulator.md tells why a few dozen plans suffice.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import FileProblem
from recycle.core.files import read_json, write_text
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import makespan_us
from recycle.core.problem import Problem, Techniques
from recycle.core.release import source_digest
from recycle.host.parallel_map import parallel_map
from recycle.planner.dead_placement import spread_failures
from recycle.planner.failure_normalization import Distribution, most_failures, most_promising_distribution, normalized_problem
from recycle.planner.solve import solve, solve_normalized
from recycle.sim.pipeline_groups import is_planned_in_groups, plan_groups

FORMAT, VERSION = "recycle-timings", 1
ONE_F_ONE_B = Techniques(adaptive=False, decoupled=False, staggered=False)
# Two numbers of failures whose periods differ by less than this share are not worth a plan in between.
TOLERANCE = 0.005
# Placed ops a plan: half of the effort of a library, because a simulation needs many plans and executes none of them.
EFFORT = 1_500_000

SlowPeers = tuple[tuple[float, ...], ...]
"""The speeds of the slow live workers of each stage."""


@dataclass(frozen=True, slots=True)
class IterationTime:
    """One iteration of a plan: period, makespan, compute time of all workers, and dead workers at each stage."""

    period_us: int
    makespan_us: int
    work_us: int
    distribution: Distribution

    def busy_share(self, num_workers: int) -> float:
        return min(1.0, self.work_us / (self.period_us * num_workers))


class IterationTimes:
    """Iteration times of one problem by its failures, cached in `folder` if given."""

    def __init__(self, problem: Problem, folder: Path | None = None) -> None:
        self.problem = problem
        text = json.dumps([source_digest(), problem.to_json(), EFFORT, TOLERANCE], sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:24]
        self._path = folder / f"timings-{name}.json" if folder else None
        self._known = _read(self._path) if self._path else {}

    def fault_free(self) -> IterationTime:
        return self._get(["count:0"])[0]

    def normalized(self, num_failures: int) -> IterationTime:
        """The time with `num_failures` dead workers where they hurt least, by a plan for as many or a few more."""
        return self._plan_normalized([num_failures])[0]

    def exactly(self, counts: Iterable[int]) -> list[IterationTime]:
        """The times by plans for exactly so many dead workers, where they hurt least."""
        return self._get([f"count:{count}" for count in counts])

    def for_distribution(self, distribution: Distribution, slow: SlowPeers = ()) -> IterationTime:
        """The time with so many dead and slow workers at each stage, where no worker moves to another stage."""
        return self.for_distributions([(distribution, slow)])[0]

    def for_distributions(self, cases: Sequence[tuple[Distribution, SlowPeers]]) -> list[IterationTime]:
        """The same for several cases, planned in parallel."""
        return self._get([_stages_key(*case) for case in cases])

    def prepare(self, counts: Iterable[int]) -> None:
        """Make the plans that `normalized` needs for these numbers of failures, in parallel."""
        self._plan_normalized(list(counts))

    def _plan_normalized(self, counts: Sequence[int]) -> list[IterationTime]:
        while True:
            answers = [self._bisect(count) for count in counts]
            missing = {count for answer in answers if not isinstance(answer, IterationTime) for count in answer}
            if not missing:
                return [answer for answer in answers if isinstance(answer, IterationTime)]
            self._get([f"count:{count}" for count in sorted(missing)])

    def _bisect(self, num_failures: int) -> "IterationTime | list[int]":
        """Return the time for `num_failures`, or the numbers of failures that must be planned first."""
        low, high = _block(num_failures, most_failures(self.problem.shape))
        below, best = (self._known.get(f"count:{count}") for count in (low, high))
        if below is None or best is None:
            return [count for count in (low, high) if f"count:{count}" not in self._known]
        while num_failures < high and best.period_us > below.period_us * (1 + self._tolerance):
            middle = (low + high) // 2
            found = self._known.get(f"count:{middle}")
            if found is None:
                return [middle]
            if num_failures > middle:
                low, below = middle, found
            else:
                high, best = middle, min(found, best, key=lambda timing: timing.period_us)
        return best

    @property
    def _tolerance(self) -> float:
        """Plans of groups are for a few more dead workers anyway, and take seconds."""
        return 2 * TOLERANCE if is_planned_in_groups(self.problem, 0) else TOLERANCE

    def _get(self, keys: list[str]) -> list[IterationTime]:
        """The times of these keys: `count:N`, N failures where they hurt least, or `stages:0,1,..`, dead workers by stage.

        After the dead workers of a stage the speeds of its slow ones may follow: `stages:0,1+0.6+0.8`.
        """
        missing = [key for key in dict.fromkeys(keys) if key not in self._known]
        if missing:
            found = parallel_map(_plan, [(self.problem, key) for key in missing])
            self._known |= dict(zip(missing, found, strict=True))
            self._save()
        return [self._known[key] for key in keys]

    def _save(self) -> None:
        if self._path:
            timings = {key: asdict(timing) for key, timing in sorted(self._known.items())}
            write_text(self._path, json.dumps({"format": FORMAT, "version": VERSION, "timings": timings}, indent=0) + "\n")


def _block(num_failures: int, most: int) -> tuple[int, int]:
    """The two powers of two around a number (0 and 1: the number itself, twice), but at most `most`."""
    if num_failures < 2:
        return num_failures, num_failures
    high = 1 << (num_failures - 1).bit_length()
    return high // 2, min(high, most)


def _read(path: Path) -> dict[str, IterationTime]:
    """Return the cached times; an unreadable file counts as empty."""
    try:
        data: dict[str, Any] = read_json(path, FORMAT, VERSION)
        timings = {key: IterationTime(**timing) for key, timing in data["timings"].items()}
        return {key: replace(timing, distribution=tuple(timing.distribution)) for key, timing in timings.items()}
    except (FileProblem, KeyError, TypeError, ValueError, AttributeError):
        return {}


def _stages_key(distribution: Distribution, slow: SlowPeers) -> str:
    speeds = slow or ((),) * len(distribution)
    texts = (
        "+".join([str(dead), *(f"{speed:g}" for speed in sorted(own))]) for dead, own in zip(distribution, speeds, strict=True)
    )
    return f"stages:{','.join(texts)}"


def _plan(given: tuple[Problem, str]) -> IterationTime:
    problem, key = given
    kind, _, text = key.partition(":")
    if kind == "count" and is_planned_in_groups(problem, int(text)):
        grouped = plan_groups(problem, int(text), EFFORT)
        return IterationTime(*grouped.times_us(), grouped.work_us, grouped.distribution)
    if kind == "stages":
        plan = solve(_problem_of(problem, text), "greedy", effort=EFFORT)
    elif problem.shared_layers:
        plan = min(_placed_plans(problem, int(text)), key=lambda plan: plan.period_us)
    else:
        plan = solve_normalized(problem, int(text), "greedy", effort=EFFORT)[0]
    return IterationTime(plan.period_us, makespan_us(plan), sum(map(plan.busy_us, plan.rows)), plan.problem.cluster.num_failed)


def fault_free_plan(problem: Problem) -> Plan:
    """The plan with nobody dead; of a large cluster that of one pipeline, which is that of all."""
    if is_planned_in_groups(problem, 0):
        return plan_groups(problem, 0, EFFORT).groups[0][0]
    return solve(problem, "greedy", effort=EFFORT)


def _problem_of(problem: Problem, text: str) -> Problem:
    """The problem with the dead and slow workers of a key: the last pipelines are dead, the first ones slow."""
    parts = [part.split("+") for part in text.split(",")]
    speeds = tuple((Worker(i, stage), float(one)) for stage, (_, *slow) in enumerate(parts) for i, one in enumerate(slow))
    return replace(normalized_problem(problem, tuple(int(part[0]) for part in parts)), speeds=speeds)


def _placed_plans(problem: Problem, num_failures: int) -> Iterator[Plan]:
    """Plans with so many dead workers, placed by the load over shared layers, and by each stage alone."""
    places = {spread_failures(problem, num_failures), most_promising_distribution(problem, num_failures)}
    for place in sorted(places):
        yield solve(normalized_problem(problem, place), "greedy", effort=EFFORT // len(places))


def one_f_one_b_time(problem: Problem, folder: Path | None = None) -> IterationTime:
    """The fault-free 1F1B iteration of `problem`, as systems run it that neither split backward passes nor re-route.

    Pipelines are alike, so that one is planned, and the reduction over all of them is added.
    """
    shape = problem.shape
    one = Problem(Cluster(Shape(1, shape.num_stages, shape.num_microbatches)), problem.profile, problem.memory, ONE_F_ONE_B)
    alone = IterationTimes(one, folder).fault_free()
    reduce_us = max(problem.profile.reduce_us(stage, shape.num_pipelines) for stage in range(shape.num_stages))
    work_us = alone.work_us * shape.num_pipelines
    return replace(alone, period_us=alone.period_us + reduce_us, makespan_us=alone.makespan_us + reduce_us, work_us=work_us)
