"""Upper bounds of what a choice can reach, so that most choices need no simulation.

With f dead workers a step takes at least

    max(bound of the fault-free period - what a smaller reduction saves,  all work / live workers)

because a plan for f dead workers would serve a cluster in which they idle, too. Pauses, lost work and nodes that are not ready
yet make it longer. The failures of the traces say for which share of the time f workers are dead at least. The bound of the
period (`planner.model.lower_bound`) holds for every plan of the shape, 1F1B among them. Systems that cut the model otherwise are
bounded by the work alone, and then by their own fault-free throughput: no system here is faster with fewer workers.

For ReCycle with shared layers the first bound is an estimate, that of stages that are perfectly even; `shared_bound` proves one.
`refined_rate` has the plans themselves for no and for a typical number of dead workers; a plan for more of them takes longer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

from recycle.core.cluster import Worker
from recycle.core.problem import Problem
from recycle.core.profile import StageProfile
from recycle.planner.model.lower_bound import Bounds, lower_bound
from recycle.sim.advise.choices import BOUND_TO_SHAPE, ELASTIC, SystemChoice, job_of, spare_workers, system_of, workers_per_server
from recycle.sim.advise.memory_needs import memory_problem, never_fits
from recycle.sim.advise.question import ClusterQuestion
from recycle.sim.job import SimulatedJob
from recycle.sim.measured_model import MeasuredModel
from recycle.sim.policy import Members, all_places
from recycle.sim.systems.recycle import Recycle


@dataclass(frozen=True, slots=True)
class Refined:
    """The upper bound after the system was asked, its own fault-free throughput, and why it does not run, if so."""

    most: float
    fault_free: float
    problem: str = ""


def first_bound(question: ClusterQuestion, choice: SystemChoice) -> float:
    """Samples a second that the choice cannot exceed over the failures of `question`."""
    job, dead = job_of(question, choice), dead_shares(question, choice)
    is_bound = choice.system.startswith(BOUND_TO_SHAPE)
    return sum(share * _most_rate(job, choice.shared_layers if is_bound else None, away) for away, share in dead.items())


def expected_rate(question: ClusterQuestion, choice: SystemChoice) -> float:
    """Samples a second of the fault-free plan, by the planner's own estimate: it proves nothing, but orders choices well."""
    job = job_of(question, choice)
    return job.samples_per_step * 1e6 / _period_estimate(job, choice.shared_layers)


def shared_bound(question: ClusterQuestion, choice: SystemChoice, folder: Path | None) -> Refined:
    """The same as `first_bound`, proven for shared layers, too; it takes longer."""
    job, dead = job_of(question, choice), dead_shares(question, choice)
    least_us = lower_bound(job.problem(shared_layers=choice.shared_layers))
    rates = {away: job.samples_per_step * 1e6 / max(1, least_us - _saved_us(job, away)) for away in dead}
    return Refined(sum(share * min(rates[away], _most_rate(job, None, away)) for away, share in dead.items()), 0.0)


def dead_shares(question: ClusterQuestion, choice: SystemChoice) -> Mapping[int, float]:
    """The share of the time in which at least so many places have no node."""
    each, spare = workers_per_server(question, choice.tensor_parallel), spare_workers(question, choice)
    shares: dict[int, float] = {}
    for servers, share in question.dead_shares.items():
        dead = min(choice.shape.num_workers, max(0, servers * each - spare))
        shares[dead] = shares.get(dead, 0.0) + share
    return shares


def refined_rate(question: ClusterQuestion, choice: SystemChoice, folder: Path | None) -> Refined:
    """Ask the system for its fault-free step, and ReCycle for some plans; 0 if it cannot run or does not fit."""
    job = job_of(question, choice)
    if problem := never_fits(job, choice.system):
        return Refined(0.0, 0.0, problem)
    system = system_of(question, choice, folder)
    everybody = all_places(choice.shape)
    decision = system.begin(Members(choice.shape, everybody))
    fault_free = decision.steady_state.samples_per_s
    if not fault_free:
        return Refined(0.0, 0.0, decision.reason or "it cannot run")
    if problem := memory_problem(job, choice.system, decision.state):
        return Refined(0.0, 0.0, problem)
    dead = dead_shares(question, choice)
    probed = {0: fault_free}
    if choice.system == ELASTIC and isinstance(system, Recycle):
        usual = _median(dead)
        probed |= {usual: _planned_rate(job, system, usual)} if usual else {}
    elif choice.shape.num_workers > 1:
        one_less = everybody - {Worker(0, 0)}
        if system.begin(Members(choice.shape, one_less)).steady_state.is_down and choice.shape.num_pipelines > 1:
            probed[1] = 0.0  # it needs all its places
    most = 0.0
    for away, share in dead.items():
        known = min(rate for count, rate in probed.items() if count <= away)
        most += share * min(known, _most_rate(job, None, away))
    return Refined(most, fault_free)


def _median(dead: Mapping[int, float]) -> int:
    """The number of dead workers that is exceeded half of the time."""
    total = 0.0
    for count, share in sorted(dead.items()):
        total += share
        if total >= 0.5:
            return count
    return max(dead)


def _planned_rate(job: SimulatedJob, system: Recycle, num_dead: int) -> float:
    if num_dead > job.num_nodes - job.shape.num_stages:
        return 0.0
    return job.samples_per_step * 1e6 / job.scaled_us(system.timings.normalized(num_dead).period_us)


def _most_rate(job: SimulatedJob, shared_layers: int | None, num_dead: int) -> float:
    """The most samples a second with so many dead workers; without a number of shared layers by the work alone."""
    live = job.num_nodes - num_dead
    if live <= 0:
        return 0.0
    least_us = _work_us(job) * job.num_microbatches / live
    if shared_layers is not None:
        least_us = max(least_us, _period_bound(job, shared_layers) - _saved_us(job, num_dead))
    return job.samples_per_step * 1e6 / max(1.0, least_us)


@lru_cache(maxsize=16384)
def _work_us(job: SimulatedJob) -> float:
    """The least time of one micro-batch at all stages, or at all layers for systems that take measured layers as equal."""
    stages = job.profile().stages
    by_stage = sum(stage.forward_us + min(stage.input_us + stage.weight_us, stage.fused_us) for stage in stages)
    if not isinstance(job.model, MeasuredModel):
        return by_stage
    return min(by_stage, sum(layer.forward_us + layer.backward_us for layer in job.layers))


def _saved_us(job: SimulatedJob, num_dead: int) -> int:
    """How much shorter a reduction can be if so many workers are dead, all at one stage."""
    profile, peers = job.profile(), job.shape.num_pipelines
    left = max(1, peers - num_dead)
    return max(profile.reduce_us(stage, peers) - profile.reduce_us(stage, left) for stage in range(len(profile.stages)))


@lru_cache(maxsize=16384)
def _period_bound(job: SimulatedJob, shared_layers: int) -> int:
    """The least period of any plan; with shared layers that of even stages."""
    problem = job.problem()
    return lower_bound(_even(problem) if shared_layers else problem)


@lru_cache(maxsize=16384)
def _period_estimate(job: SimulatedJob, shared_layers: int) -> int:
    problem = job.problem()
    bounds = Bounds(_even(problem) if shared_layers else problem)
    return max(bounds.estimate_us(stage, job.shape.num_pipelines) for stage in range(job.shape.num_stages))


def _even(problem: Problem) -> Problem:
    """The problem with the mean costs at every stage."""
    stages = problem.profile.stages
    names = (item.name for item in fields(StageProfile) if item.name != "spread")
    mean = {name: sum(getattr(stage, name) for stage in stages) // len(stages) for name in names}
    even = replace(problem.profile, stages=(StageProfile(**mean),) * len(stages), layers=())
    return replace(problem, profile=even)
