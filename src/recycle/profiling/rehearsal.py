"""rehearse: a profile by rehearsal: every worker of the cluster trains for a while over the job's own transport.

The workers run 1F1B, once with whole and once with split backward passes, and then fewer pipelines, until the medians are stable;
`profile_fit` makes a profile of their spans.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from statistics import median

import torch

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.op import Kind, Op
from recycle.core.plans.plan import Plan, Quality, Row, make_row, microbatch_of
from recycle.core.plans.rules import needs, period_us
from recycle.core.problem import Memory, Problem, Techniques
from recycle.core.profile import Profile, StageProfile, Taken
from recycle.profiling.emulated_device import EmulatedDevice
from recycle.profiling.layer_times import measure_layers
from recycle.profiling.machine import machine_name, one_thread
from recycle.profiling.plan_runner import PlanRun, PlanRunner, StateBytes
from recycle.profiling.profile_fit import ProfileFit
from recycle.profiling.worker_pool import ChooseCores, any_core, worker_pool
from recycle.runtime.boundary.nests import num_samples_in
from recycle.runtime.compute.microbatches import largest_of
from recycle.runtime.compute.stage_bytes import StageBytes, measure_bytes, return_gpu_memory
from recycle.runtime.job import Job
from recycle.runtime.launch.configure import worker_spec

_WARM_UP, _PER_ROUND = 2, 4
Progress = Callable[[int, float], None]
"""Called after each round with the number of rounds, and the largest change of a median, as a share."""


@dataclass(frozen=True, slots=True)
class Patience:
    """When a rehearsal ends: when no median changes by more than `share` any more, or after `most_rounds`."""

    share: float = 0.02
    least_rounds: int = 3
    most_rounds: int = 8


_PATIENCE = Patience()


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """A profile, and whether its medians were stable; `median_change` is the largest change in the last round, as a share."""

    profile: Profile
    num_rounds: int
    median_change: float
    is_stable: bool


def rehearsal_plan(shape: Shape, is_split: bool) -> Plan:
    """1F1B without dead workers, as a plan of ops that all take 1 µs: known without a planner, and good enough to measure by."""
    stage = StageProfile(1, 1, 1, 1 if is_split else 2)
    techniques = Techniques(adaptive=False, decoupled=is_split, staggered=True)
    profile = Profile((stage,) * shape.num_stages, name="rehearsal")
    problem = Problem(Cluster.of(shape, ()), profile, Memory.unlimited(), techniques)
    orders = {worker: _order(shape, worker.pipeline, worker.stage, is_split) for worker in shape.workers()}
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


def _timed(problem: Problem, orders: Mapping[Worker, Iterable[Op]]) -> tuple[Row, ...]:
    """Rows in these orders, every op as early as it can be."""
    ends: dict[Op, int] = {}
    timed = {worker: list[tuple[int, Op]]() for worker in orders}
    free, left = dict.fromkeys(orders, 0), {worker: deque(order) for worker, order in orders.items()}
    while any(left.values()):
        for worker, ops in left.items():
            while ops and all(before in ends for before in needs(ops[0], problem.shape.num_stages)):
                op = ops.popleft()
                start = max([free[worker], *(ends[before] for before in needs(op, problem.shape.num_stages))])
                timed[worker].append((start, op))
                ends[op] = free[worker] = start + problem.duration_us(op.stage, op.kind)
                if op.kind is Kind.B:  # it stands for its first half
                    ends[replace(op, kind=Kind.I)] = ends[op]
    return tuple(make_row(problem.shape, worker, own) for worker, own in timed.items())


class RehearsalFits:
    """The fits of a rehearsal: of all pipelines, with whole and with split backward passes, and of fewer pipelines.

    A round is `runs`, in this order; the spans of each are added to its fit.
    """

    def __init__(self, shape: Shape) -> None:
        most_others = shape.num_workers - 1
        self.together = ProfileFit(shape, most_others)
        numbers = sorted({1, (shape.num_pipelines + 1) // 2} - {shape.num_pipelines})
        self._fewer = [ProfileFit(Shape(num, shape.num_stages, shape.num_microbatches), most_others) for num in numbers]
        self.runs = [RehearsalRun(self.together, is_split=False), RehearsalRun(self.together, is_split=True)]
        self.runs += [RehearsalRun(fit, is_split=True) for fit in self._fewer]

    def profile(self, sizes: Sequence[StageBytes], states: Mapping[int, StateBytes], ping_us: float, taken: Taken) -> Profile:
        return self.together.profile(sizes, states, ping_us, taken, self._fewer)


class RehearsalRun:
    """A plan that is run for some iterations, and the fit that its spans are added to."""

    num_iterations = _WARM_UP + _PER_ROUND

    def __init__(self, fit: ProfileFit, is_split: bool) -> None:
        self.plan = rehearsal_plan(fit.shape, is_split)
        self._fit = fit

    def add(self, runs: Mapping[Worker, PlanRun]) -> None:
        """Add the spans of the workers that took part in the plan."""
        self._fit.add({worker: run for worker, run in runs.items() if run.spans}, _WARM_UP)


def rehearse(
    job: Job,
    model: str,
    patience: Patience = _PATIENCE,
    progress: Progress = lambda rounds, change: None,
    device: EmulatedDevice | None = None,
    choose_cores: ChooseCores = any_core,
) -> Rehearsed:
    """Measure the costs of `job` with all workers of its shape at once; its plan is not run, and nothing of it is changed.

    With a `device`, ops take the times that it says; its layers are equal, and are not measured. Each worker runs on a
    core that `choose_cores` chooses for it, if it chooses any.
    """
    shape = job.shape
    spec = worker_spec(job)
    sizes = measure_bytes(job.stages, job.microbatches, job.loss_function, job.options.ops, job.options.device)
    fits, numbers, change = RehearsalFits(shape), count(1), 1.0
    with worker_pool(list(shape.workers()), partial(PlanRunner, spec, device=device), choose_cores=choose_cores) as pool:
        states = {worker.stage: state for worker, state in pool.ask(PlanRunner.state_bytes).items()}
        pings_us = [ping for own in pool.ask(PlanRunner.ping).values() for ping in own]
        for number in range(patience.most_rounds):
            before = fits.together.medians()
            for run in fits.runs:
                request = partial(PlanRunner.run, number=next(numbers), plan=run.plan, num_iterations=run.num_iterations)
                run.add(pool.ask(request))
            change = fits.together.median_change(before)
            progress(number + 1, change)
            if number + 1 >= patience.least_rounds and change <= patience.share:
                break
    inputs, _ = largest_of(job.microbatches)
    taken = Taken(
        job.options.device,
        machine_name(job.options.device),
        torch.__version__,
        shape.num_pipelines,
        num_samples_in(inputs),
        model,
    )
    with one_thread():
        layers = () if device is not None else measure_layers(job)
    return_gpu_memory()
    profile = replace(fits.profile(sizes, states, median(pings_us) if pings_us else 0.0, taken), layers=layers)
    return Rehearsed(profile, number + 1, change, change <= patience.share)
