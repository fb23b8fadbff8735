"""A profile by rehearsal: every worker of the cluster trains for a while over the job's own links, and what it did is read.

Ops that are measured one after the other in one process are too fast: in a cluster on one machine all workers want its memory at
the same time, and each op also packs up what it sends. So the workers play 1F1B, once with whole and once with split backward
passes, and then fewer pipelines, until the medians stand still; `reading` makes a profile of what they did.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from statistics import median
from typing import Any

import torch

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.op import Kind, Op
from recycle.core.plans.plan import Plan, Quality, Row, make_row, microbatch_of
from recycle.core.plans.rules import needs, period_us
from recycle.core.problem import Memory, Problem, Techniques
from recycle.core.profile import Profile, StageProfile, Taken
from recycle.profiling.plan_runner import PlanRun, PlanRunner, WeightState
from recycle.profiling.profile_fit import ProfileFit
from recycle.profiling.worker_pool import Station, worker_pool
from recycle.runtime.compute.stage_costs import StageBytes, machine, measure_bytes
from recycle.runtime.job import Job
from recycle.runtime.launch.configure import worker_spec
from recycle.runtime.worker.worker_spec import WorkerSpec

_WARM_UP, _PER_ROUND = 2, 4
Progress = Callable[[int, float], None]
"""Told after each round: how many there were, and how far the medians still move, as a share."""


@dataclass(frozen=True, slots=True)
class Patience:
    """When a rehearsal ends: when no median moves by more than `share` any more, or after so many rounds."""

    share: float = 0.02
    least_rounds: int = 3
    most_rounds: int = 8


_PATIENCE = Patience()


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """A profile, and whether the medians in it had come to rest."""

    profile: Profile
    num_rounds: int
    unrest: float
    is_at_rest: bool


def rehearsal_plan(shape: Shape, is_split: bool) -> Plan:
    """1F1B for nobody dead, as a plan of ops that all take 1 µs: known without a planner, and good enough to measure by."""
    stage = StageProfile(1, 1, 1, 1 if is_split else 2)
    techniques = Techniques(adaptive=False, decoupled=is_split, staggered=True)
    profile = Profile((stage,) * shape.num_stages, name="rehearsal")
    problem = Problem(Cluster.of(shape, ()), profile, Memory.unlimited(), techniques)
    orders = {worker: list(_order(shape, worker.pipeline, worker.stage, is_split)) for worker in shape.workers()}
    plan = Plan(problem, _timed(problem, orders), 1, Quality(0, "feasible", "rehearsal", 0.0))
    return replace(plan, period_us=period_us(plan))


def _order(shape: Shape, pipeline: int, stage: int, is_split: bool) -> Iterable[Op]:
    num = shape.num_microbatches
    num_ahead = min(shape.num_stages - stage, num)
    backward = (Kind.I, Kind.W) if is_split else (Kind.B,)

    def op(kind: Kind, index: int) -> Op:
        return Op(stage, kind, microbatch_of(shape, pipeline * num + index))

    yield from (op(Kind.F, index) for index in range(num_ahead))
    for index in range(num):
        yield from (op(kind, index) for kind in backward)
        if index + num_ahead < num:
            yield op(Kind.F, index + num_ahead)


def _timed(problem: Problem, orders: Mapping[Worker, Sequence[Op]]) -> tuple[Row, ...]:
    """Rows in these orders, every op as early as it can be."""
    ends: dict[Op, int] = {}
    starts: dict[Worker, list[int]] = {worker: [] for worker in orders}
    free = dict.fromkeys(orders, 0)
    num_left = sum(map(len, orders.values()))
    while num_left:
        for worker, order in orders.items():
            while len(starts[worker]) < len(order):
                op = order[len(starts[worker])]
                waits = [_end(ends, before) for before in needs(op, problem.shape.num_stages)]
                if None in waits:
                    break
                start = max([free[worker], *(end for end in waits if end is not None)])
                starts[worker].append(start)
                ends[op] = free[worker] = start + problem.duration_us(op.stage, op.kind)
                num_left -= 1
    return tuple(make_row(problem.shape, worker, zip(starts[worker], order, strict=True)) for worker, order in orders.items())


def _end(ends: Mapping[Op, int], op: Op) -> int | None:
    """When an op ends; a whole backward pass stands for its first half."""
    return ends.get(op, ends.get(replace(op, kind=Kind.B)) if op.kind is Kind.I else None)


class RehearsalFits:
    """What is read from rounds: of all pipelines together, with whole and with split passes, and of fewer of them.

    A round is `plays`, in this order; each is told what came of it.
    """

    def __init__(self, shape: Shape) -> None:
        most_others = shape.num_workers - 1
        self.together = ProfileFit(shape, most_others)
        numbers = sorted({1, (shape.num_pipelines + 1) // 2} - {shape.num_pipelines})
        self._fewer = [ProfileFit(Shape(num, shape.num_stages, shape.num_microbatches), most_others) for num in numbers]
        self.plays = [RehearsalPlay(self.together, is_split=False), RehearsalPlay(self.together, is_split=True)]
        self.plays += [RehearsalPlay(reading, is_split=True) for reading in self._fewer]

    def profile(self, sizes: Sequence[StageBytes], states: Mapping[int, WeightState], ping_us: float, taken: Taken) -> Profile:
        return self.together.profile(sizes, states, ping_us, taken, self._fewer)


class RehearsalPlay:
    """A plan that is played for some iterations, and who reads what was done."""

    num_iterations = _WARM_UP + _PER_ROUND

    def __init__(self, reading: ProfileFit, is_split: bool) -> None:
        self.plan = rehearsal_plan(reading.shape, is_split)
        self._reading = reading

    def add(self, played: Mapping[Worker, PlanRun]) -> None:
        """Read it; who has no part in the plan did nothing."""
        self._reading.add({worker: told for worker, told in played.items() if told.spans}, _WARM_UP)


def rehearse(job: Job, model: str, patience: Patience = _PATIENCE, progress: Progress = lambda rounds, unrest: None) -> Rehearsed:
    """Measure what `job` costs with all workers of its shape at once; its plan is not played, and nothing of it is changed."""
    shape = job.plan.problem.shape
    kit = worker_spec(job)
    sizes = measure_bytes(job.stages, job.microbatches, job.loss, job.options.autocast, job.options.device)
    readings, numbers, unrest = RehearsalFits(shape), count(1), 1.0
    with worker_pool(list(shape.workers()), partial(_Rehearser, kit)) as crew:
        states = {worker.stage: state for worker, state in crew.ask(AskState()).items()}
        pings_us = [ping for told in crew.ask(Ping()).values() for ping in told]
        for number in range(patience.most_rounds):
            before = readings.together.medians()
            for play in readings.plays:
                play.add(crew.ask(Play(next(numbers), play.plan, play.num_iterations)))
            unrest = readings.together.unrest(before)
            progress(number + 1, unrest)
            if number + 1 >= patience.least_rounds and unrest <= patience.share:
                break
    inputs, _ = job.microbatches.get(0, 0, 0)
    taken = Taken(job.options.device, machine(job.options.device), torch.__version__, shape.num_pipelines, len(inputs), model)
    profile = readings.profile(sizes, states, median(pings_us) if pings_us else 0.0, taken)
    return Rehearsed(profile, number + 1, unrest, unrest <= patience.share)


@dataclass(frozen=True, slots=True)
class Play:
    """The question to play a plan for some iterations."""

    number: int
    plan: Plan
    num_iterations: int


@dataclass(frozen=True, slots=True)
class AskState:
    """The question how large the state of a stage is."""


@dataclass(frozen=True, slots=True)
class Ping:
    """The question how long the smallest message takes, in µs."""


class _Rehearser:
    """A member of the crew."""

    def __init__(self, kit: WorkerSpec, station: Station) -> None:
        self._kit, self._station = kit, station
        self._player = PlanRunner(kit, station.store)

    def answer(self, question: Any) -> Any:
        match question:
            case Play(number, plan, num_iterations):
                if self._station.worker not in [row.worker for row in plan.rows]:
                    return PlanRun()
                kit = replace(self._kit, shape=plan.problem.shape)
                return PlanRunner(kit, self._station.store).play(number, plan, self._station.worker, num_iterations)
            case AskState():
                return self._player.state(self._station.worker.stage)
            case Ping():
                return self._player.ping(self._station.worker, self._station.workers)
        raise AssertionError(question)
