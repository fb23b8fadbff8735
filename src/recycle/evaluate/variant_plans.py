"""The plans of a measured cluster: one for each variant, and one for every worker or pair that may be killed."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path

from recycle.core.cluster import Shape, Worker
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import PlanFolder
from recycle.core.profile import Profile, StageProfile
from recycle.evaluate.hardware.kills import DEATHS
from recycle.evaluate.hardware.race import plan_path
from recycle.evaluate.hardware.setup import ELASTIC, Setup
from recycle.evaluate.hardware.variants import Variant
from recycle.planner.problem_from_text import problem
from recycle.planner.solve import solve

ALL = "adaptive,decoupled,staggered"
_VARIANT_S, _DEATH_S = 10.0, 1.0


def make_plans(folder: Path, setup: Setup, variants: list[Variant], profile: Profile, say: Callable[[str], None]) -> None:
    """Make the plans that are missing."""
    for variant in variants:
        path = plan_path(folder, variant)
        if not variant.is_torch and not path.exists():
            if setup.study == ELASTIC:
                plan = _elastic(variant, setup, profile)
            else:
                plan = _solved(variant.shape(setup), profile, variant.failed, variant.techniques, "auto", _VARIANT_S)
            plan.save(path)
            say(f"planned {variant.title}: {plan.period_us / 1e3:.1f} ms, {plan.gap - 1:.1%} above its bound")
    if setup.study == ELASTIC:
        return
    source = PlanFolder(folder / DEATHS)
    for failed in _deaths(setup):
        if not source.path(failed).exists():
            _solved(setup.shape, profile, failed, ALL, "greedy", _DEATH_S).save(source.path(failed))


def _elastic(variant: Variant, setup: Setup, profile: Profile) -> Plan:
    """A plan with room for the activations of twice as many micro-batches as there are stages."""
    made = problem(
        *(setup.pipelines, setup.stages, setup.microbatches),
        fail=map(str, sorted(variant.failed)),
        profile=profile_of(variant, setup, profile),
        memory=2 * setup.stages,
        shared_layers=variant.shared_layers,
        speeds=variant.slow if variant.knows_speeds else "",
    )
    return solve(made, "greedy", 2 * _VARIANT_S)


def profile_of(variant: Variant, setup: Setup, profile: Profile) -> Profile:
    """The profile of a variant, from one of the model as the setup cuts it: with equal layers, or with moved ones."""
    if setup.study != ELASTIC:
        return profile
    own = [setup.layers // setup.stages] * setup.stages
    if not variant.layers:
        return profile if profile.layers else profile.with_layers(own)
    stages = [
        _scaled(stage, Fraction(num, before)) for stage, num, before in zip(profile.stages, variant.layers, own, strict=True)
    ]
    return replace(profile, stages=tuple(stages)).with_layers(variant.layers)


def _scaled(stage: StageProfile, share: Fraction) -> StageProfile:
    """The costs of a stage with so many times its layers. What it sends stays as large as it was."""
    kept = ("output_bytes", "spread")
    names = [field.name for field in fields(stage) if field.name not in kept]
    return replace(stage, **{name: round(getattr(stage, name) * share) for name in names})


def _solved(shape: Shape, profile: Profile, failed: Iterable[Worker], techniques: str, method: str, limit_s: float) -> Plan:
    # 1F1B holds the micro-batches between a stage's forward and backward only; the other variants have no memory limit.
    in_flight = [min(shape.num_microbatches, shape.num_stages - stage) for stage in range(shape.num_stages)]
    sizes = shape.num_pipelines, shape.num_stages, shape.num_microbatches
    memory = in_flight if techniques == "none" else "unlimited"
    names = map(str, sorted(failed))
    return solve(problem(*sizes, fail=names, profile=profile, memory=memory, techniques=techniques), method, limit_s)


def _deaths(setup: Setup) -> Iterator[frozenset[Worker]]:
    """Yield no worker, each worker, and each pair that leaves every stage a live worker."""
    workers = list(setup.shape.workers())
    yield frozenset()
    yield from (frozenset([worker]) for worker in workers)
    for one, other in combinations(workers, 2):
        if one.stage != other.stage or setup.pipelines > 2:
            yield frozenset([one, other])
