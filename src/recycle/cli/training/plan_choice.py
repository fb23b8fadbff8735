"""The choice of the plan of a training run: from a file, from a library, or made by the planner."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from recycle.cli.training.train_sections import ClusterSection
from recycle.core.cluster import Shape, Worker
from recycle.core.errors import ForeignPlan, UserError
from recycle.core.plans.library import Library, without_failures
from recycle.core.plans.plan import Plan
from recycle.core.problem import Problem
from recycle.core.profile import Profile
from recycle.planner.heuristic.greedy import compile_kernels
from recycle.planner.live_planner import Planner
from recycle.planner.problem_from_text import parse_costs
from recycle.planner.problem_from_text import problem as describe_problem
from recycle.planner.shared_layers_choice import AUTO, SharedLayersChoice, choose_shared_layers
from recycle.planner.solve import solve

_PLAN_S = 10.0


def choose_plan(cluster: ClusterSection, measured: Profile | None = None, num_layers: Sequence[int] = ()) -> Plan:
    """The plan that the configuration asks for; `measured` is the profile of `cluster.measure`.

    `num_layers` are those of each stage, if stages share layers or layers may move. `cluster.shared_layers` is a number, unless a
    plan or a library says how many.
    """
    if cluster.plan:
        plan = Plan.load(cluster.plan)
        _refuse_other(plan.problem, cluster, f"the plan {cluster.plan}")
        return plan
    if cluster.library:
        library = Library.open(cluster.library)
        _refuse_other(library.problem, cluster, f"the library {cluster.library}")
        return library.get(len(_checked(library.problem.shape, cluster.dead_workers)))
    problem = _problem(cluster, measured, num_layers)
    # The compiler's time is not the search's. And nobody waits for it later: a slow worker or a failure is to have its plan soon.
    compile_kernels(problem)
    # The greedy method is near the bound in a moment; a few per cent of a plan are not worth a wait before training begins.
    return solve(problem, "greedy", _PLAN_S)


def choose_layers(
    cluster: ClusterSection, measured: Profile | None, num_layers: Sequence[int], limit_bytes: int | None
) -> SharedLayersChoice | None:
    """The choice of `auto`: how many layers to share; None if nothing is to be chosen, because a plan or library says it."""
    if cluster.shared_layers != AUTO or cluster.plan or cluster.library:
        return None
    return choose_shared_layers(_problem(replace(cluster, dead=""), measured, num_layers), limit_bytes)


def _problem(cluster: ClusterSection, measured: Profile | None, num_layers: Sequence[int]) -> Problem:
    profile = measured or (Profile.load(Path(cluster.profile)) if cluster.profile else None)
    if num_layers and not (profile and profile.layers):
        profile = (profile or Profile.uniform(cluster.stages, *parse_costs(cluster.op_costs))).with_layers(num_layers)
    return describe_problem(
        cluster.pipelines,
        cluster.stages,
        cluster.microbatches,
        fail=cluster.dead,
        costs=None if profile else cluster.op_costs,
        profile=profile,
        memory=cluster.memory or None,
        techniques=cluster.techniques,
        shared_layers=cluster.shared_layers if isinstance(cluster.shared_layers, int) else 0,
        speeds=cluster.speed,
    )


def choose_source(plan: Plan, cluster: ClusterSection) -> Planner:
    """The source of plans for the workers that are live after a death or a join."""
    library = Library.open(cluster.library) if cluster.library else None
    return Planner(without_failures(plan.problem), library, given=plan, mean_time_s=cluster.mean_time_s)


def describe_moves(plan: Plan, cluster: ClusterSection) -> list[str]:
    """Sentences on workers that move: a library's plan has its dead where they cost least, so live workers take other places."""
    named, planned = set(cluster.dead_workers), set(plan.problem.cluster.failed)
    if not cluster.library or named == planned:
        return []
    pairs = zip(sorted(planned - named), sorted(named - planned), strict=True)
    return [f"{mover} takes the place of {dead}, because a dead worker costs less at {mover}" for mover, dead in pairs]


def _checked(shape: Shape, dead: list[Worker]) -> list[Worker]:
    """The dead workers, each of this shape and named once; a stage may have no live worker left."""
    for worker in dead:
        if not (worker.pipeline < shape.num_pipelines and worker.stage < shape.num_stages):
            raise UserError(f"{worker} is not a worker of this cluster, which has {_shown(shape)}")
        if dead.count(worker) > 1:
            raise UserError(f"{worker} is named as failed twice: name each worker once")
    return dead


def _refuse_other(found: Problem, cluster: ClusterSection, what: str) -> None:
    if found.shape != cluster.shape:
        raise ForeignPlan(
            f"{what} is for {_shown(found.shape)}, but this run has {_shown(cluster.shape)}: say --pipelines "
            f"{found.shape.num_pipelines} --stages {found.shape.num_stages} --microbatches {found.shape.num_microbatches}, "
            "or plan again"
        )
    if cluster.shared_layers not in (0, AUTO, found.shared_layers):
        raise ForeignPlan(
            f"{what} is for stages that share {found.shared_layers} layers, and not {cluster.shared_layers}: leave "
            "cluster.shared_layers out, or plan again"
        )
    if cluster.profile and Profile.load(Path(cluster.profile)) != found.profile:
        raise ForeignPlan(f"{what} was made from another profile ({found.profile.name}) than {cluster.profile}: plan again")


def _shown(shape: Shape) -> str:
    return f"{shape.num_pipelines} pipelines of {shape.num_stages} stages with {shape.num_microbatches} micro-batches each"
