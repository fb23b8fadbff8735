"""Timings: how long an iteration takes with so many workers dead, from the real planner, kept on disk.

A plan for more failures serves fewer, too: a live worker may play dead. So the period never falls with the number of failures,
and between two numbers with (nearly) the same period nothing is left to plan: `prepare` bisects, and plans a few dozen numbers
where a library would plan hundreds.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from recycle.core.cluster import Cluster, Shape
from recycle.core.errors import FileProblem
from recycle.core.files import read_json, write_text
from recycle.core.op import Kind
from recycle.core.plan import Plan
from recycle.core.problem import Problem, Techniques
from recycle.core.release import RELEASE
from recycle.core.rules import makespan_us
from recycle.planner.build import LIBRARY_EFFORT
from recycle.planner.normalize import Distribution, normalized_problem
from recycle.planner.solve import solve, solve_normalized
from recycle.sim.parallel import spread

FORMAT, VERSION = "recycle-timings", 1
ONE_F_ONE_B = Techniques(adaptive=False, decoupled=False, staggered=False)
# Two numbers of failures whose periods differ by less than this share are not worth a plan in between.
TOLERANCE = 0.002
_TIME_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Timing:
    """One iteration of a plan: when the next one starts, how long it takes by itself, how much work is in it, who is dead."""

    period_us: int
    makespan_us: int
    work_us: int
    distribution: Distribution

    def busy_share(self, num_workers: int) -> float:
        """The share of the workers' time in which they compute."""
        return min(1.0, self.work_us / (self.period_us * num_workers))


class Timings:
    """Timings of one problem, whatever its failures; what was planned once is remembered in `folder`, if there is one."""

    def __init__(self, problem: Problem, folder: Path | None = None) -> None:
        self.problem = problem
        text = json.dumps([RELEASE, problem.to_json(), LIBRARY_EFFORT, TOLERANCE], sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:24]
        self._path = folder / f"timings-{name}.json" if folder else None
        self._known = _read(self._path) if self._path else {}

    def fault_free(self) -> Timing:
        return self._get([_Key("count", (0,))])[0]

    def normalized(self, num_failures: int) -> Timing:
        """The timing with `num_failures` dead workers where they hurt least, by the best plan for as many or more."""
        key = _Key("count", (num_failures,))
        counts = self._counts()
        lower, upper = [n for n in counts if n < num_failures], [n for n in counts if n > num_failures]
        if key not in self._known and not (lower and upper and not self._is_open(lower[-1], upper[0])):
            self._get([key])
        return self._best(num_failures)

    def as_is(self, distribution: Distribution) -> Timing:
        """The timing with so many dead workers at each stage, none of which is replaced from another stage."""
        return self._get([_Key("stages", distribution)])[0]

    def prepare(self, most_failures: int, tick: Callable[[int], None] = lambda done: None) -> None:
        """Plan what `normalized` needs for 0 to `most_failures`, in parallel; `tick` hears of every round of plans."""
        planned = sorted({0, min(1, most_failures), most_failures})
        self._get([_Key("count", (count,)) for count in planned])
        while True:
            tick(len(planned))
            gaps = [(low, high) for low, high in pairwise(planned) if self._is_open(low, high)]
            if not gaps:
                return
            middle = [(low + high) // 2 for low, high in gaps]
            self._get([_Key("count", (count,)) for count in middle])
            planned = sorted([*planned, *middle])

    def prepare_as_is(self, distributions: Iterable[Distribution]) -> None:
        self._get([_Key("stages", distribution) for distribution in distributions])

    def _counts(self) -> list[int]:
        return sorted(key.numbers[0] for key in self._known if key.kind == "count")

    def _best(self, num_failures: int) -> Timing:
        """The best of what is known for as many failures or more."""
        options = [self._known[_Key("count", (count,))] for count in self._counts() if count >= num_failures]
        return min(options, key=lambda timing: timing.period_us)

    def _is_open(self, low: int, high: int) -> bool:
        return high - low > 1 and self._best(high).period_us > self._best(low).period_us * (1 + TOLERANCE)

    def _get(self, keys: "list[_Key]") -> list[Timing]:
        missing = [key for key in dict.fromkeys(keys) if key not in self._known]
        if missing:
            found = spread(_plan, [(self.problem, key) for key in missing])
            self._known |= dict(zip(missing, found, strict=True))
            self._save()
        return [self._known[key] for key in keys]

    def _save(self) -> None:
        if self._path:
            timings = {str(key): asdict(timing) for key, timing in sorted(self._known.items(), key=lambda item: str(item[0]))}
            write_text(self._path, json.dumps({"format": FORMAT, "version": VERSION, "timings": timings}, indent=0) + "\n")


@dataclass(frozen=True, slots=True)
class _Key:
    """What a timing is of: `count` so many failures where they hurt least, or `stages` so many at each stage."""

    kind: str
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(map(str, self.numbers))}"

    @staticmethod
    def parse(text: str) -> "_Key":
        kind, _, numbers = text.partition(":")
        return _Key(kind, tuple(map(int, numbers.split(","))))


def _read(path: Path) -> dict[_Key, Timing]:
    """Return the timings at `path`; what cannot be read is planned again."""
    try:
        data: dict[str, Any] = read_json(path, FORMAT, VERSION)
        timings = {_Key.parse(text): Timing(**timing) for text, timing in data["timings"].items()}
        return {key: replace(timing, distribution=tuple(timing.distribution)) for key, timing in timings.items()}
    except (FileProblem, KeyError, TypeError, ValueError, AttributeError):
        return {}


def _plan(given: tuple[Problem, _Key]) -> Timing:
    problem, key = given
    if key.kind == "count":
        plan = solve_normalized(problem, key.numbers[0], "greedy", _TIME_LIMIT_S, LIBRARY_EFFORT)[0]
    else:
        plan = solve(normalized_problem(problem, key.numbers), "greedy", _TIME_LIMIT_S, LIBRARY_EFFORT)
    return timing_of(plan)


def timing_of(plan: Plan) -> Timing:
    work = 0
    for row in plan.rows:
        work += sum(row.kinds.count(kind.value) * plan.problem.duration_us(row.worker.stage, kind) for kind in Kind)
    return Timing(plan.period_us, makespan_us(plan), work, plan.problem.cluster.num_failed)


def one_f_one_b(problem: Problem, folder: Path | None = None) -> Timing:
    """The fault-free 1F1B iteration of `problem`: what systems do that neither split nor re-route.

    Pipelines are alike, so that one is planned; the reduction over all of them comes on top.
    """
    shape = problem.shape
    one = Problem(Cluster(Shape(1, shape.num_stages, shape.num_microbatches)), problem.profile, problem.memory, ONE_F_ONE_B)
    alone = Timings(one, folder).fault_free()
    reduce_us = max(problem.profile.reduce_us(stage, shape.num_pipelines) for stage in range(shape.num_stages))
    return Timing(
        alone.period_us + reduce_us,
        alone.makespan_us + reduce_us,
        alone.work_us * shape.num_pipelines,
        (0,) * shape.num_stages,
    )
