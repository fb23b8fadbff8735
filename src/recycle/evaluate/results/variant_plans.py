"""Plans for a cluster that is measured: one for each variant, and one for whoever may die, all from its profile."""

from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

from recycle.core.cluster import Worker
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import PlanFolder
from recycle.core.profile import Profile
from recycle.evaluate.hardware.kills import DEATHS
from recycle.evaluate.hardware.race import plan_path
from recycle.evaluate.hardware.setup import Setup
from recycle.evaluate.hardware.variants import Variant
from recycle.planner.problem_from_text import problem
from recycle.planner.solve import solve

ALL = "adaptive,decoupled,staggered"
_VARIANT_S, _DEATH_S = 10.0, 1.0
Say = Callable[[str], None]


def make_plans(folder: Path, setup: Setup, variants: list[Variant], profile: Profile, say: Say) -> None:
    """Make the plans that are missing."""
    for variant in variants:
        path = plan_path(folder, variant)
        if not variant.is_torch and not path.exists():
            plan = _plan(variant, setup, profile)
            plan.save(path)
            say(f"planned {variant.title}: {plan.period_us / 1e3:.1f} ms, {plan.gap - 1:.1%} above its bound")
    source = PlanFolder(folder / DEATHS)
    for failed in _deaths(setup):
        if not source.path(failed).exists():
            _solved(setup, profile, ",".join(map(str, sorted(failed)))).save(source.path(failed))


def _plan(variant: Variant, setup: Setup, profile: Profile) -> Plan:
    shape = variant.shape(setup)
    # 1F1B holds what lies between a micro-batch's way down and its way back; the others may hold what they like.
    in_flight = [min(shape.num_microbatches, shape.num_stages - stage) for stage in range(shape.num_stages)]
    return solve(
        problem(
            shape.num_pipelines,
            shape.num_stages,
            shape.num_microbatches,
            fail=map(str, variant.failed),
            profile=profile,
            memory=in_flight if variant.techniques == "none" else "unlimited",
            techniques=variant.techniques,
        ),
        "auto",
        _VARIANT_S,
    )


def _solved(setup: Setup, profile: Profile, dead: str) -> Plan:
    shape = setup.shape
    wanted = problem(
        shape.num_pipelines,
        shape.num_stages,
        shape.num_microbatches,
        fail=dead,
        profile=profile,
        memory="unlimited",
        techniques=ALL,
    )
    return solve(wanted, "greedy", _DEATH_S)


def _deaths(setup: Setup) -> Iterator[frozenset[Worker]]:
    """Nobody, each one, and each two that leave every stage somebody."""
    workers = list(setup.shape.workers())
    yield frozenset()
    yield from (frozenset([worker]) for worker in workers)
    for one, other in combinations(workers, 2):
        if one.stage != other.stage or setup.pipelines > 2:
            yield frozenset([one, other])
