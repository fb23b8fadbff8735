"""The folder of a measured cluster, and the parts of the evaluation that need its hardware.

setup.json      the cluster and its model
profile.json    the costs of ops, messages, reductions and steps with all workers at once
plans/          a plan for each variant, made from the profile
rounds/         a profile for each round, measured between its trials
measured.jsonl  iteration times and losses of each trial of each variant
spans/          the ops of each worker with their times, in the last round
deaths/         plans for every worker, and every pair of workers, that may be killed
recoveries.json the duration of each recovery from a kill and of each rejoin
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from recycle.core.errors import FileProblem, UserError
from recycle.core.files import read_json, write_text
from recycle.core.plans.plan_source import PlanFolder
from recycle.core.profile import Profile
from recycle.evaluate.hardware.core_keepalive import are_cores_migrated, cores_kept_awake
from recycle.evaluate.hardware.gpu_slices import slices
from recycle.evaluate.hardware.kills import DEATHS, measure_recoveries
from recycle.evaluate.hardware.measurement_size import MeasurementSize
from recycle.evaluate.hardware.race import Trial, run_race
from recycle.evaluate.hardware.setup import CPU_CORES, EMULATED, PACED_CORES, TECHNIQUES, Setup
from recycle.evaluate.hardware.variants import Variant
from recycle.profiling.machine import a_core_each, num_cores
from recycle.profiling.rehearsal import Patience, rehearsal_plan, rehearse
from recycle.profiling.worker_pool import ChooseCores, any_core
from recycle.runtime.options import refuse_absent_device

SETUP, PROFILE = "setup.json", "profile.json"
FORMAT, VERSION = "recycle-cluster", 1
# Seconds between two kills: enough for the killed worker to rejoin.
_CYCLE_S = 4.0
_USUAL_WORKERS = 12
# On cores whose speed changes all the time, medians are never stable; predictions use the profiles of the rounds anyway.
_PATIENCE = Patience(most_rounds=4)
Say = Callable[[str], None]


def choose_setup(
    folder: Path,
    backend: str | None,
    num_workers: int | None,
    is_small: bool,
    study: str | None = None,
    microbatches: int | None = None,
) -> Setup:
    """Return the setup with these options; without any option, that of the folder if it has one."""
    is_any = is_small or any(option is not None for option in (backend, num_workers, study, microbatches))
    if not is_any and (folder / SETUP).exists():
        return read_setup(folder)
    workers = _USUAL_WORKERS if num_workers is None else num_workers
    return Setup.usual(backend or CPU_CORES, workers, is_small, study or TECHNIQUES, microbatches)


def begin_evaluation(folder: Path, setup: Setup) -> None:
    """Create the folder of a measurement; one that exists must be of the same setup."""
    if setup.pipelines < 2:
        raise UserError(f"{setup.pipelines} pipeline has no peers that could take over: give at least 2")
    if (folder / SETUP).exists():
        if read_setup(folder) != setup:
            raise UserError(f"{folder} holds a measurement of something else: name another folder")
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / SETUP, json.dumps({"format": FORMAT, "version": VERSION, **asdict(setup)}, indent=1) + "\n")


def read_setup(folder: Path) -> Setup:
    data = read_json(folder / SETUP, FORMAT, VERSION)
    try:
        return Setup(**{key: value for key, value in data.items() if key not in ("format", "version")})
    except TypeError as problem:
        raise FileProblem(f"{folder / SETUP} is not a setup: {problem}") from None


@contextmanager
def hardware(setup: Setup) -> Iterator[ChooseCores]:
    """Prepare the hardware of a setup for all parts: GPU slices, or a core for each worker where there are as many.

    Worker processes are forked from a server that must start inside this context, once.
    """
    refuse_absent_device(setup.device)
    if setup.backend == PACED_CORES and num_cores() < setup.num_workers:
        raise UserError(
            f"{setup.num_workers} workers need as many cores to keep their pace, and this machine has {num_cores()}: "
            f"give --backend {EMULATED}, which needs only a few"
        )
    if setup.is_gpu:
        with slices(setup.num_workers):
            yield any_core
    elif are_cores_migrated():
        with cores_kept_awake() as choose_cores:
            yield choose_cores
    else:
        yield a_core_each


def measure_part(
    part: str,
    folder: Path,
    setup: Setup,
    size: MeasurementSize,
    say: Say,
    variants: Sequence[Variant],
    choose_cores: ChooseCores = any_core,
) -> None:
    """Measure the part `profile`, `race` or `deaths`, or the rest of it; a part that is done is not measured again."""
    if part == "profile":
        _measure_profile(folder, setup, say, choose_cores)
    elif part == "race":
        _measure_variants(folder, setup, size, say, variants, choose_cores)
    else:
        period_us = PlanFolder(folder / DEATHS).answer(frozenset()).plan.period_us
        measure_recoveries(folder, setup, size.kills, max(2, round(_CYCLE_S * 1e6 / period_us)), say)


def _measure_profile(folder: Path, setup: Setup, say: Say, choose_cores: ChooseCores) -> None:
    if (folder / PROFILE).exists():
        return
    say(f"measuring the profile: {setup.num_workers} worker processes start and train until the medians of op times are stable")
    job = setup.job(rehearsal_plan(setup.shape, is_split=True))

    def progress(number: int, change: float) -> None:
        say(f"round {number}: medians moved by {change:.1%}")

    found = rehearse(job, setup.model, _PATIENCE, progress, setup.emulated, choose_cores)
    if not found.is_stable:
        say(f"medians still moved by {found.median_change:.1%} after {found.num_rounds} rounds: this machine is not quiet")
    write_text(folder / PROFILE, json.dumps(found.profile.to_json(), indent=1) + "\n")


def _measure_variants(
    folder: Path,
    setup: Setup,
    size: MeasurementSize,
    say: Say,
    variants: Sequence[Variant],
    choose_cores: ChooseCores,
) -> None:
    def progress(trial: Trial, num_done: int, num_trials: int) -> None:
        took = f"{trial.iteration_us / 1e3:.1f} ms, last loss {trial.losses[-1]:.4f}"
        say(f"trial {num_done} of {num_trials}: {trial.variant} {took}")

    profile = Profile.load(folder / PROFILE) if (folder / PROFILE).exists() else None
    run_race(folder, setup, variants, size.rounds, size.iterations, progress, profile, choose_cores)
