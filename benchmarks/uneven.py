"""The benchmark of uneven stages: cuts by micro-batch against torch's schedules at their best static cut, with nobody dead.

make bench                                      the tables, printed
python benchmarks/uneven.py --only two-workers  one pipeline of two stages, for machines with two to eleven cores
python benchmarks/uneven.py --only slices       twelve workers that share an NVIDIA GPU
python benchmarks/uneven.py --quick             small models, one round: for machines on which workers share cores
python benchmarks/uneven.py --save              also writes docs/benchmarks/<date>-uneven.md

The head makes the last stage heavier, and whole layers cannot level that. The workers train the same GPT in turn: by our plan
with cuts, by our plan without any, and by each schedule of torch.distributed.pipelining. Torch's stages have the layers of the
best of all static cuts, by the measured costs of layers; ours begin at the same boundaries.
"""

import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
from sheet import NO, UNJUDGED, YES, Case, Row, Script, Section

import recycle
from recycle.core.layer_sums import with_layer_counts
from recycle.core.plans.plan import Plan
from recycle.core.profile import Profile
from recycle.evaluate.hardware.contenders import Contender, ContenderTurn
from recycle.evaluate.hardware.evaluation_folder import hardware
from recycle.evaluate.hardware.race import WARM_UP, Trial, run_trial
from recycle.evaluate.hardware.setup import CPU_CORES, GPU_SLICES, Setup
from recycle.evaluate.hardware.static_cuts import best_static_cut, layer_work_us
from recycle.evaluate.hardware.torch_contender import TORCH_1F1B, TORCH_ZBV, TORCH_ZERO_BUBBLE
from recycle.profiling.machine import one_thread
from recycle.profiling.rehearsal import Patience, rehearsal_plan, rehearse
from recycle.profiling.stage_times import measure_stages
from recycle.profiling.worker_pool import worker_pool
from recycle.runtime.boundary.boundary_spec import BoundarySpec

SHARED = 1
_PLAN_S = 20.0
_SAME_LOSS = {CPU_CORES: 2e-3, GPU_SLICES: 0.2}
"""How far losses may differ: on a GPU weights and activations are bfloat16."""
_HARDWARE = {CPU_CORES: "a core", GPU_SLICES: "a slice of a GPU"}
CUT, UNCUT = "cuts at a shared layer", "the best static cut"
TORCH = {TORCH_1F1B: "torch 1F1B", TORCH_ZERO_BUBBLE: "torch zero bubble (ZB1P)", TORCH_ZBV: "torch zero bubble (ZBV)"}


@dataclass(frozen=True, slots=True)
class Race:
    """One cluster and model: its layers, its micro-batches a pipeline, and how often every contender has its turn.

    No round but the first begins after `begin_within_s`.
    """

    pipelines: int
    stages: int
    layers: int
    microbatches: int
    num_rounds: int
    num_iterations: int
    is_quick: bool
    begin_within_s: float = 70.0
    backend: str = CPU_CORES

    @property
    def setup(self) -> Setup:
        """A GPT whose head costs about as much as two layers: from one and a half to two and a half, by the processor."""
        if self.backend == GPU_SLICES:
            large: dict[str, Any] = {"width": 1024, "heads": 8, "context": 1024, "samples": 2, "vocabulary": 16384}
            return Setup(GPU_SLICES, self.pipelines, self.stages, self.microbatches, layers=self.layers, **large)
        small: dict[str, Any] = {"width": 64, "context": 64, "samples": 2, "vocabulary": 2048}
        usual: dict[str, Any] = {"width": 256, "context": 128, "samples": 1, "vocabulary": 8192}
        # Two workers have half of the model each, so it is smaller.
        half: dict[str, Any] = {"width": 128, "context": 128, "samples": 1, "vocabulary": 4096}
        sizes = small if self.is_quick else half if self.stages == 2 else usual
        return Setup(CPU_CORES, self.pipelines, self.stages, self.microbatches, layers=self.layers, **sizes)


@dataclass(frozen=True, slots=True)
class Contest:
    """A way to run: the plan, if it is ours, the layers of each stage, and the load of the slowest worker over the mean load."""

    plan: Plan | None
    layers: tuple[int, ...]
    worst_load: float


def measured_profile(setup: Setup, layers: tuple[int, ...] | None = None) -> Profile:
    """The costs of the stages and of their layers.

    On cores in processor time, because other load would make some layers dear. On a GPU with all workers at once, because they
    share its memory's bandwidth.
    """
    if setup.is_gpu:
        found = rehearsed(setup)
        return with_layer_counts(found, layers) if layers is not None else found
    job = setup.job(rehearsal_plan(setup.shape, is_split=True))
    if layers is not None:
        job = replace(job, stages=setup.modules(layers=layers))
    with one_thread():
        return measure_stages(job, num_repeats=8, clock_us=lambda: time.process_time_ns() / 1000)


@cache
def rehearsed(setup: Setup) -> Profile:
    return rehearse(setup.job(rehearsal_plan(setup.shape, is_split=True)), setup.model, Patience(most_rounds=3)).profile


def make_contests(setup: Setup) -> dict[str, Contest]:
    work_us = layer_work_us(measured_profile(setup))
    shape = setup.shape
    num_stages = shape.num_stages
    static = {False: best_static_cut(work_us, num_stages), True: best_static_cut(work_us, 2 * num_stages, is_v=True)}
    profile = measured_profile(setup, static[False])
    contests = {}
    for name, shared in ((CUT, SHARED), (UNCUT, 0)):
        counts = shape.num_pipelines, num_stages, shape.num_microbatches
        problem = recycle.problem(*counts, profile=profile, memory=2 * num_stages, shared_layers=shared)
        plan = recycle.solve(problem, "greedy", _PLAN_S)
        busy_us = [plan.busy_us(row) for row in plan.rows]
        contests[name] = Contest(plan, static[False], max(busy_us) * len(busy_us) / sum(busy_us))
    for name in TORCH:
        layers = static[name == TORCH_ZBV]
        contests[name] = Contest(None, layers, _worst_load(work_us, layers, name == TORCH_ZBV))
    return contests


def boundaries_of(setup: Setup, contest: Contest) -> dict[int, BoundarySpec]:
    assert contest.plan is not None
    return setup.job(contest.plan).boundaries()


def _worst_load(work_us: list[int], layers: tuple[int, ...], is_v: bool) -> float:
    """The work of the slowest worker over the mean of all."""
    stops = [sum(layers[: stage + 1]) for stage in range(len(layers))]
    loads = [sum(work_us[stop - own : stop]) for stop, own in zip(stops, layers, strict=True)]
    if is_v:
        loads = [one + other for one, other in zip(loads, reversed(loads), strict=True)][: len(loads) // 2]
    return max(loads) * len(loads) / sum(loads)


@cache
def measure(race: Race) -> dict[str, tuple[Contest, list[Trial]]]:
    setup = race.setup
    with ExitStack() as stack:
        choose_cores = stack.enter_context(hardware(setup))
        # In a process of its own, which has a slice of the GPU as workers have one, and ends with it.
        with ProcessPoolExecutor(1, get_context("spawn")) as other:
            contests = other.submit(make_contests, setup).result()
            boundaries = other.submit(boundaries_of, setup, contests[UNCUT]).result()
        trials: dict[str, list[Trial]] = {name: [] for name in contests}
        make_contender = partial(Contender, setup, boundaries)
        preload = ["torch.distributed.pipelining"]
        pool = stack.enter_context(worker_pool(list(setup.shape.workers()), make_contender, preload, choose_cores))
        numbers = count(1)
        begin_s = time.monotonic()
        for round_ in range(race.num_rounds):
            if round_ and time.monotonic() - begin_s > race.begin_within_s:
                break
            for name, contest in contests.items():
                length = WARM_UP + race.num_iterations
                turn = ContenderTurn(next(numbers), name, length, contest.plan, range(race.pipelines), layers=contest.layers)
                trial = run_trial(pool, turn, round_)[0]
                trials[name].append(trial)
                print(f"round {round_ + 1}: {TORCH.get(name, name)} {trial.iteration_us / 1000:.1f} ms", file=sys.stderr)
    for losses in zip(*(trial.losses for own in trials.values() for trial in own), strict=True):
        assert max(losses) - min(losses) < _SAME_LOSS[race.backend], f"the contests came to different losses: {losses}"
    return {name: (contests[name], trials[name]) for name in contests}


def row(name: str, race: Race) -> Row:
    found = measure(race)
    contest, trials = found[name]

    def times_as_fast(other: str) -> float:
        # Inside each round, because the machine's speed changes.
        return median(theirs.iteration_us / own.iteration_us for theirs, own in zip(found[other][1], trials, strict=True))

    over_torch = min(times_as_fast(torch) for torch in TORCH)
    asked, met = "–", UNJUDGED
    if name == CUT:
        asked, met = "> 1 × torch's best", UNJUDGED if race.is_quick else YES if over_torch > 1 else NO
    return (
        f"{race.layers}",
        TORCH.get(name, name),
        ",".join(map(str, contest.layers)),
        f"{contest.worst_load:.3f}",
        f"{median(trial.iteration_us for trial in trials) / 1000:.1f} ms",
        f"{len(trials)}",
        f"{over_torch:.3f}",
        f"{contest.plan.period_us / 1000:.1f} ms" if contest.plan is not None else "–",
        asked,
        met,
    )


RACES = {
    "uneven": [Race(3, 4, layers, 24, num_rounds=4, num_iterations=4, is_quick=False) for layers in (12, 16)],
    "two-workers": [Race(1, 2, layers, 24, num_rounds=6, num_iterations=4, is_quick=False) for layers in (4, 6)],
    "slices": [Race(3, 4, layers, 24, 2, 4, False, begin_within_s=60.0, backend=GPU_SLICES) for layers in (12, 16)],
}
QUICK = {
    "uneven": [Race(3, 4, 12, 6, num_rounds=1, num_iterations=3, is_quick=True)],
    "two-workers": [Race(1, 2, 4, 6, num_rounds=1, num_iterations=3, is_quick=True)],
    "slices": [Race(3, 4, 12, 6, num_rounds=1, num_iterations=3, is_quick=True, backend=GPU_SLICES)],
}


def _sections(name: str, is_quick: bool) -> list[Section]:
    races = (QUICK if is_quick else RACES)[name]
    if name == "slices" and not torch.cuda.device_count():
        print("slices: left out, because torch finds no GPU here", file=sys.stderr)
        return []
    cases = tuple(
        Case(f"{race.layers} layers, {TORCH.get(contest, contest)}", partial(row, contest, race))
        for race in races
        for contest in (CUT, UNCUT, *TORCH)
    )
    race = races[0]
    pipelines = f"{race.pipelines} pipeline{'s' if race.pipelines > 1 else ''}"
    about = (
        f"{pipelines} of {race.stages} stages, {race.microbatches} micro-batches a pipeline, a GPT whose head costs about "
        f"two layers, nobody dead, a process on {_HARDWARE[race.backend]} for each worker; medians of at most {race.num_rounds} "
        "rounds in which all take turns. Torch's stages have the layers of the best of all static cuts by measured costs; ours "
        "begin there, and "
        f"with cuts {SHARED} layer on either side of a boundary is shared. "
        '"Worst load" is the work of the slowest worker over the mean, "over torch" the speed over the fastest of torch\'s.'
    )
    header = ("layers", "contest", "by stage", "worst load", "iteration", "rounds", "over torch", "planned", "asked", "met")
    title = f"Uneven stages, nobody dead: {pipelines} of {race.stages} stages on {race.backend}"
    return [Section(name, title, about, header, cases)]


SCRIPT = Script(
    "uneven",
    "Let cuts race against torch's best static cut of a model with a heavy head.",
    tuple(RACES),
    quick="small models and one round, for machines on which workers share cores",
    libraries=("torch",),
    width=150,
)


if __name__ == "__main__":
    sys.exit(SCRIPT.run(_sections))
