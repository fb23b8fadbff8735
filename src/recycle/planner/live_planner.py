"""Planner: the plan source of a running job, from its library or planned on the spot, with moves between stages where they pay.

Workers may move to other stages, or whole layers may. What is expected to do the most iterations until the next failure is
taken, the time of the transfer included.

The search effort is counted in placed ops, never in seconds: the same dead workers give the same plan however busy the machine
is, and a coordinator that was restarted decides as it did before.
"""

import math
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import FileProblem, ForeignPlan, UserError
from recycle.core.layer_sums import with_layer_counts
from recycle.core.plans.library import Library, without_failures
from recycle.core.plans.plan import Plan, Row
from recycle.core.plans.plan_source import PlanAssignment, RunLayers, num_live_at, places_for
from recycle.core.plans.rules import check
from recycle.core.plans.steady_period import Speeds
from recycle.core.problem import Problem
from recycle.core.units import format_duration, format_us
from recycle.planner.failure_normalization import Distribution, MoveDecision, best_distribution, decide_move, move_time_us
from recycle.planner.heuristic.greedy import compile_kernels
from recycle.planner.model.lower_bound import Bounds, lower_bound
from recycle.planner.solve import solve
from recycle.planner.whole_layers import LayerCounts, LayerMove, layer_moves

# The search effort for one plan, in placed ops and in runs of the list scheduler: tens of milliseconds for a dozen workers, and
# within 1 % of the period that a second of search finds; fractions of a second for a thousand workers.
_MOST_PLACED, _MOST_RUNS = 100_000, 55
_ON_THE_SPOT = "planned on the spot"
# So many distributions of layers are planned for, if their bounds are better than what there is; and layers move only for a gain
# of this share, since costs are not known better.
_MOST_MOVES, _LEAST_GAIN = 2, 0.01


@dataclass(frozen=True, slots=True)
class Planner:
    """The plan source of a running job: it answers a set of dead workers with a plan and the worker for each row.

    Args:
        problem: The job's problem, with all workers alive.
        library: The plans that were made before the run, if there are any.
        may_move: Whether workers, or layers, change stage where that pays. Without it, a worker changes stage only if a stage
            has no live worker left.
        expected_iterations: The iterations expected until the next failure; a move has to pay within them.
        given: A plan that exists already, and is the answer where its dead workers are the dead workers.
        mean_time_s: The mean time between failures in seconds. If it is known, a move has to pay within it instead.
        layer_counts: The number of layers that are each stage's own at present, in a job whose layers may move. The answer may
            have others: then their state is transferred. Without it, layers stay where they are.

    Raises:
        ForeignPlan: `library` or `given` was made for another problem.
        UserError: `expected_iterations` is negative, or `mean_time_s` is not above 0.

    Example:
        >>> import recycle
        >>> planner = recycle.Planner(recycle.problem(2, 2, 4, costs="10,13,9"))
        >>> assignment = planner.answer(frozenset({recycle.Worker.parse("W1_0")}))
        >>> len(assignment.plan.rows), assignment.moves
        (3, ())
    """

    problem: Problem
    library: Library | None = None
    may_move: bool = True
    expected_iterations: int = 1000
    given: Plan | None = None
    mean_time_s: float | None = None
    layer_counts: LayerCounts = ()

    def __post_init__(self) -> None:
        assert not self.problem.cluster.failed, "the problem of a planner has no dead worker: `answer` gets the dead workers"
        if self.expected_iterations < 0:
            raise UserError(f"{self.expected_iterations} iterations are expected until the next failure, but it is at least 0")
        if self.mean_time_s is not None and not 0 < self.mean_time_s < math.inf:
            raise UserError(f"the mean time between failures is {self.mean_time_s!r} s, but it is a number above 0")
        if self.library is not None and self.library.problem != self.problem:
            raise ForeignPlan(
                f"the library {self.library.folder} was made for another shape, profile, memory or techniques than this job has: "
                "build one for this job"
            )
        if self.given is not None and without_failures(self.given.problem) != self.problem:
            raise ForeignPlan("the plan was made for another shape, profile, memory or techniques than this job has: plan again")

    def at_speeds(self, speeds: Speeds) -> "Planner":
        """The planner for workers of other speeds. A library and a given plan are for the speeds that they were made for."""
        problem = replace(self.problem, speeds=speeds)
        is_same = problem == self.problem
        return replace(self, problem=problem, library=self.library if is_same else None, given=self.given if is_same else None)

    def at_layers(self, layers: RunLayers) -> "Planner":
        """The planner for a job whose stages have these layers now; the mean time of the run counts if none was given."""
        mean_time_s = layers.mean_time_us / 1e6 if self.mean_time_s is None and layers.mean_time_us else self.mean_time_s
        return replace(self, layer_counts=layers.counts, mean_time_s=mean_time_s)

    def answer(self, failed: frozenset[Worker]) -> PlanAssignment:
        compile_kernels(self.problem)  # before the run, in the first call, rather than during a recovery
        if not self.layer_counts:
            return self._answer(failed)
        staying = self._with_layers(self.layer_counts)
        answer = staying._answer(failed)
        if not self.may_move or 0 in num_live_at(self.problem.shape, failed):
            return answer
        return self._move_layers(staying, answer, failed)

    def _with_layers(self, counts: LayerCounts) -> "Planner":
        """The planner whose stages have these layers for good. A library and a given plan are for the job's own."""
        problem = replace(self.problem, profile=with_layer_counts(self.problem.profile, counts))
        is_same = counts == self.problem.layer_counts
        made = replace(self, library=None, given=None, layer_counts=(), problem=problem)
        return replace(made, library=self.library, given=self.given) if is_same else made

    def _move_layers(self, staying: "Planner", answer: PlanAssignment, failed: frozenset[Worker]) -> PlanAssignment:
        """Let whole layers change stage if more iterations are expected until the next failure than with `answer`."""
        horizon_us, period_us = staying._horizon_us(answer.plan.period_us), answer.plan.period_us
        pause_us = staying._move_us([place.stage for _, place in answer.copies], Cluster(self.problem.shape, failed))
        best, num_best = answer, max(0, horizon_us - pause_us) / period_us
        num_staying, cluster = num_best, Cluster(self.problem.shape, failed)
        own, present = self._problem_of(cluster, failed), staying._problem_of(cluster, failed)
        for move in layer_moves(own, present, horizon_us)[:_MOST_MOVES]:
            if move.iterations_within(horizon_us, move.bound_us) < max(num_best, num_staying * (1 + _LEAST_GAIN)):
                break  # not even its bound is better, and the others are less promising
            plan = self._solve(move.problem)
            num = move.iterations_within(horizon_us, plan.period_us)
            if num > max(num_best, num_staying * (1 + _LEAST_GAIN)):
                text = _layer_text(move, num, num_staying, horizon_us)
                best, num_best = _answer(plan, failed, f"{_ON_THE_SPOT}: {text}"), num
        return best

    def _horizon_us(self, period_us: int) -> int:
        """The time until the next failure is expected, for a job whose iterations take this long."""
        return round(self.mean_time_s * 1e6) if self.mean_time_s is not None else self.expected_iterations * period_us

    def _answer(self, failed: frozenset[Worker]) -> PlanAssignment:
        """The best answer with the layers where they are."""
        num_live = num_live_at(self.problem.shape, failed)
        if self.given is not None and self.given.problem.cluster.failed == failed:
            return _answer(self.given, failed, "the plan that the job was given")
        stored = self._stored(len(failed))
        if 0 in num_live:
            return self._fill(failed, num_live, stored)
        cluster = Cluster(self.problem.shape, failed)
        if (plan := _fitting(stored, cluster)) is not None:
            why = "the failures lie as planned, so that nobody changes stage" if failed else "nobody is dead"
            return _answer(plan, failed, f"{_name_of(plan)}: {why}")
        return self._weigh(cluster, stored)

    def _stored(self, num_failures: int) -> Plan | None:
        """The library's plan for `num_failures`, or None if it is missing or broken: a recovery goes on without it."""
        if self.library is None or not self.library.path(num_failures).exists():
            return None
        try:
            plan = self.library.get(num_failures)
        except FileProblem:
            return None
        return None if check(plan) else plan

    def _fill(self, failed: frozenset[Worker], num_live: list[int], stored: Plan | None) -> PlanAssignment:
        """Let spare workers take over the stages that have no live worker; no other worker moves."""
        cluster = nearest(self.problem.shape, failed, _filled(self.problem, num_live))
        found = _fitting(stored, cluster)
        plan = found or self._plan(cluster, failed)
        places = places_for(plan.problem.cluster, failed)
        movers = ", ".join(f"{now} takes over stage {place.stage}" for place, now in _stage_changes(places))
        lost = " and ".join(f"stage {stage}" for stage, num in enumerate(num_live) if num == 0)
        origin = _name_of(found) if found else _ON_THE_SPOT
        return PlanAssignment(plan, places, f"{origin}: nobody is left at {lost}, so that {movers}")

    def _weigh(self, cluster: Cluster, stored: Plan | None) -> PlanAssignment:
        """Plan for the failures as they are, and let workers change stage if that pays."""
        as_is = self._plan(cluster, cluster.failed)
        if not cluster.failed:
            return _staying(as_is, "nobody is dead")
        if not self.may_move:
            return _staying(as_is, "workers may not change stage")
        spread = stored.problem.cluster.num_failed if stored else best_distribution(self.problem, len(cluster.failed))
        if spread == cluster.num_failed:
            return _staying(as_is, "the failures lie where they hurt least")
        there = nearest(self.problem.shape, cluster.failed, spread)
        found = _fitting(stored, there)
        if found is None:
            at_best = self._decide(as_is, lower_bound(self._problem_of(there, cluster.failed)), places_for(there, cluster.failed))
            if not at_best.moves:
                return _staying(as_is, f"at best, {at_best.reason}")
        plan = found or self._plan(there, cluster.failed)
        places = places_for(plan.problem.cluster, cluster.failed)
        decision = self._decide(as_is, plan.period_us, places)
        if not decision.moves:
            return _staying(as_is, decision.reason)
        return PlanAssignment(plan, places, f"{_name_of(found) if found else _ON_THE_SPOT}: {decision.reason}")

    def _decide(self, as_is: Plan, other_us: int, places: Mapping[Worker, Worker]) -> MoveDecision:
        stages = [place.stage for place, _ in _stage_changes(places)]
        num_iterations = self._horizon_us(as_is.period_us) // as_is.period_us
        return decide_move(as_is.period_us, other_us, self._move_us(stages, as_is.problem.cluster), num_iterations)

    def _move_us(self, stages: Sequence[int], cluster: Cluster) -> int:
        return move_time_us(self.problem.profile, stages, cluster.num_live)

    def _problem_of(self, cluster: Cluster, failed: frozenset[Worker]) -> Problem:
        """The problem of a cluster in which live workers have taken the places of `failed`: each takes its speed along."""
        speeds = dict(self.problem.speeds)
        moved = {place: speeds[now] for place, now in places_for(cluster, failed).items() if now in speeds}
        return replace(self.problem, cluster=cluster, speeds=tuple(moved.items()))

    def _plan(self, cluster: Cluster, failed: frozenset[Worker]) -> Plan:
        return self._solve(self._problem_of(cluster, failed))

    def _solve(self, problem: Problem) -> Plan:
        num_ops = 3 * problem.shape.num_stages * problem.shape.num_chains
        effort = min(_MOST_PLACED, _MOST_RUNS * num_ops)
        return solve(problem, "greedy", effort=effort)


def _answer(plan: Plan, failed: frozenset[Worker], reason: str) -> PlanAssignment:
    return PlanAssignment(plan, places_for(plan.problem.cluster, failed), reason)


def _layer_text(move: LayerMove, num: float, num_staying: float, horizon_us: int) -> str:
    counts = ", ".join(map(str, move.problem.layer_counts))
    return (
        f"whole layers move, so that stages have {counts}: the transfer takes {format_us(move.transfer_us)}, and within "
        f"{format_duration(horizon_us)}, until the next failure, {num:.0f} iterations are expected instead of {num_staying:.0f}"
    )


def _staying(plan: Plan, why: str) -> PlanAssignment:
    return _answer(plan, plan.problem.cluster.failed, f"{_ON_THE_SPOT}, and nobody moves: {why}")


def _name_of(stored: Plan) -> str:
    num = len(stored.problem.cluster.failed)
    return f"the library's plan for {num} {'failure' if num == 1 else 'failures'}"


def _stage_changes(places: Mapping[Worker, Worker]) -> list[tuple[Worker, Worker]]:
    """The new and the present place of each worker that changes stage."""
    return [(place, now) for place, now in sorted(places.items()) if now.stage != place.stage]


def _fitting(stored: Plan | None, cluster: Cluster) -> Plan | None:
    """The stored plan if it has as many dead at each stage as `cluster`; with the same dead if renaming pipelines allows it."""
    if stored is None or stored.problem.cluster.num_failed != cluster.num_failed:
        return None
    if stored.problem.speeds:  # peers are not alike
        return stored if stored.problem.cluster == cluster else None
    return renamed(stored, cluster) or stored


def _filled(problem: Problem, num_live: list[int]) -> Distribution:
    """Failures by stage after the fewest moves that give every stage a worker; each leaves the stage where that costs least."""
    bounds, live = Bounds(problem), list(num_live)

    def without_one(stage: int) -> tuple[int, int, int]:
        return max(bounds.stage_terms(stage, live[stage] - 1)), bounds.estimate_us(stage, live[stage] - 1), stage

    for lost in (stage for stage, num in enumerate(num_live) if num == 0):
        live[min((stage for stage, num in enumerate(live) if num > 1), key=without_one)] -= 1
        live[lost] = 1
    return tuple(problem.shape.num_pipelines - num for num in live)


def nearest(shape: Shape, failed: frozenset[Worker], distribution: Distribution) -> Cluster:
    """The cluster with this distribution of failures in which only workers that change stage change place."""
    dead: set[Worker] = set()
    for stage, num in enumerate(distribution):
        peers = [Worker(pipeline, stage) for pipeline in reversed(range(shape.num_pipelines))]
        dead |= set(sorted(peers, key=lambda worker: worker not in failed)[:num])
    return Cluster(shape, frozenset(dead))


def renamed(plan: Plan, cluster: Cluster) -> Plan | None:
    """The same plan with its pipelines in another order, so that its dead are those of `cluster`; None if no order does that.

    Pipelines are alike, so the plan is as legal and as good. No worker changes place, so a worker that rejoins gets its own.
    """
    order = _order(plan.problem.cluster, cluster)
    if order is None:
        return None
    num_microbatches = plan.problem.shape.num_microbatches
    chains = [home * num_microbatches + index for home in order for index in range(num_microbatches)]
    rows = {}
    for row in plan.rows:
        worker = Worker(order[row.worker.pipeline], row.worker.stage)
        rows[worker] = Row(worker, row.kinds, array("q", map(chains.__getitem__, row.chains)), row.starts_us)
    problem = replace(plan.problem, cluster=cluster)
    cuts = tuple(array("b", [0]) * len(chains) for _ in plan.cuts)
    for offsets, before in zip(cuts, plan.cuts, strict=True):
        for chain, offset in zip(chains, before, strict=True):
            offsets[chain] = offset
    return replace(plan, problem=problem, rows=tuple(rows[worker] for worker in cluster.live_workers()), cuts=cuts)


def _order(planned: Cluster, real: Cluster) -> list[int] | None:
    """For each pipeline of `planned` one of `real` that has its dead at the same stages, each taken once."""
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for pipeline in range(real.shape.num_pipelines):
        alike[_dead_stages(real, pipeline)].append(pipeline)
    order = []
    for pipeline in range(planned.shape.num_pipelines):
        others = alike[_dead_stages(planned, pipeline)]
        if not others:
            return None
        order.append(others.pop(0))
    return order


def _dead_stages(cluster: Cluster, pipeline: int) -> tuple[int, ...]:
    return tuple(stage for stage in range(cluster.shape.num_stages) if not cluster.is_live(Worker(pipeline, stage)))
