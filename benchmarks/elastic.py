"""The benchmark of elastic cuts: what twelve workers keep of their throughput when one is dead, and how cuts level uneven stages.

make bench                                    the tables, printed
python benchmarks/elastic.py --quick          a small model, one round: for machines on which workers share cores
python benchmarks/elastic.py --save           also writes docs/benchmarks/<date>-elastic.md
"""

import sys
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from statistics import median

import torch
from sheet import NO, UNJUDGED, YES, Case, Row, Script, Section
from uneven_race import uneven_section

import recycle
from recycle.core.plans.plan import Plan
from recycle.core.problem import Problem
from recycle.core.profile import Profile
from recycle.evaluate.hardware.contenders import Contender, ContenderTurn
from recycle.evaluate.hardware.race import WARM_UP, Trial, run_trial
from recycle.evaluate.hardware.setup import CPU_CORES, Setup
from recycle.profiling.rehearsal import rehearsal_plan
from recycle.profiling.stage_times import measure_stages
from recycle.profiling.worker_pool import worker_pool

PIPELINES, STAGES, LAYERS, SHARED, DEAD = 3, 4, 24, 2, "W1_2"
LEAST_KEPT, LEAST_OVER_REROUTING = 0.88, 1.2
_PLAN_S = 20.0


@dataclass(frozen=True, slots=True)
class Contest:
    """A way to run: with one dead worker or none, and with shared layers or none."""

    name: str
    fail: str
    shared_layers: int


FAULT_FREE, REROUTED, CUT = (
    Contest("nobody dead", "", 0),
    Contest("one dead, re-routed", DEAD, 0),
    Contest("one dead, cut at 2 shared layers", DEAD, SHARED),
)
CONTESTS = (FAULT_FREE, Contest("nobody dead, 2 shared layers", "", SHARED), REROUTED, CUT)


def setup_of(microbatches: int, is_quick: bool) -> Setup:
    sizes = {"width": 64, "context": 64, "samples": 2} if is_quick else {"width": 256, "context": 128, "samples": 1}
    return Setup(CPU_CORES, PIPELINES, STAGES, microbatches, layers=LAYERS, **sizes)


def measured_profile(setup: Setup) -> Profile:
    """The costs of the stages on this machine, with equal layers."""
    torch.set_num_threads(1)  # as in a worker
    profile = measure_stages(setup.job(rehearsal_plan(setup.shape, is_split=True)))
    return profile.with_layers([LAYERS // STAGES] * STAGES)


def plan_of(setup: Setup, profile: Profile, contest: Contest) -> Plan:
    problem: Problem = recycle.problem(
        PIPELINES, STAGES, setup.microbatches, fail=contest.fail, profile=profile, memory=2 * STAGES
    )
    return recycle.solve(replace(problem, shared_layers=contest.shared_layers), "greedy", _PLAN_S)


@cache
def measure(microbatches: int, num_rounds: int, num_iterations: int, is_quick: bool) -> dict[str, tuple[Plan, list[Trial]]]:
    setup = setup_of(microbatches, is_quick)
    profile = measured_profile(setup)
    plans = {contest.name: plan_of(setup, profile, contest) for contest in CONTESTS}
    trials: dict[str, list[Trial]] = {name: [] for name in plans}
    make_contender = partial(Contender, setup, setup.job(plans[FAULT_FREE.name]).tensor_specs())
    with worker_pool(list(setup.shape.workers()), make_contender, []) as pool:
        numbers = count(1)
        for round_ in range(num_rounds):
            for name, plan in plans.items():
                turn = ContenderTurn(next(numbers), name, WARM_UP + num_iterations, plan, range(PIPELINES))
                trials[name].append(run_trial(pool, turn, round_)[0])
    losses = {tuple(round(loss, 3) for loss in trial.losses) for own in trials.values() for trial in own}
    assert len(losses) == 1, f"the contests came to different losses: {losses}"
    return {name: (plans[name], trials[name]) for name in plans}


def row(contest: Contest, microbatches: int, num_rounds: int, num_iterations: int, is_quick: bool) -> Row:
    found = measure(microbatches, num_rounds, num_iterations, is_quick)
    (plan, trials), base, rerouted = found[contest.name], found[FAULT_FREE.name], found[REROUTED.name]
    # Inside each round, because the machine's speed changes.
    kept = median(other.iteration_us / own.iteration_us for other, own in zip(base[1], trials, strict=True))
    over = median(other.iteration_us / own.iteration_us for other, own in zip(rerouted[1], trials, strict=True))
    asked, met = "–", UNJUDGED
    if contest is CUT:
        asked = f"≥ {LEAST_KEPT}" + (f", ≥ {LEAST_OVER_REROUTING} × re-routed" if microbatches >= 24 else "")
        is_met = kept >= LEAST_KEPT and (microbatches < 24 or over >= LEAST_OVER_REROUTING)
        met = UNJUDGED if is_quick else YES if is_met else NO
    return (
        str(microbatches),
        contest.name,
        f"{median(trial.iteration_us for trial in trials) / 1000:.1f} ms",
        f"{kept:.3f}",
        f"{base[0].period_us / plan.period_us:.3f}",
        f"{over:.3f}",
        f"{plan.gap:.3f}",
        asked,
        met,
    )


def _sections(name: str, is_quick: bool) -> list[Section]:
    if name == "uneven":
        return [uneven_section(name, is_quick)]
    sizes = (1, 3) if is_quick else (4, 4)
    cases = tuple(
        Case(f"{microbatches} micro-batches, {contest.name}", partial(row, contest, microbatches, *sizes, is_quick))
        for microbatches in ((6,) if is_quick else (6, 24))
        for contest in CONTESTS
    )
    about = (
        f"{PIPELINES} pipelines of {STAGES} stages, {LAYERS} equal layers, memory of {2 * STAGES} micro-batches, a process on a "
        "core for each worker; medians of rounds in which all take their turns. The plans are made from a profile that was "
        f"measured just before. With one of {PIPELINES * STAGES} dead, {1 - 1 / (PIPELINES * STAGES):.3f} of the workers live."
    )
    header = ("micro-batches", "contest", "iteration", "kept", "planned", "over re-routing", "period over bound", "asked", "met")
    return [Section(name, "One dead worker of twelve", about, header, cases)]


SCRIPT = Script(
    "elastic",
    "Measure what twelve workers keep of their throughput when one is dead, and how cuts level uneven stages.",
    ("dead", "uneven"),
    quick="a small model and one round, for machines on which workers share cores",
    libraries=("torch",),
    width=150,
)


if __name__ == "__main__":
    sys.exit(SCRIPT.run(_sections))
