"""The folder of a measured cluster, and the parts of the evaluation that need its hardware.

setup.json      what is measured
profile.json    what ops, messages, reductions and steps cost with all workers at once
plans/          a plan for each variant, made from the profile
rounds/         a profile for each round, from a rehearsal between its turns
measured.jsonl  what each turn of each variant took
spans/          who ran what when, in the last round
deaths/         plans for whoever may die
recoveries.json what each death and each return took
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from recycle.core.errors import FileProblem, UserError
from recycle.core.files import read_json, write_text
from recycle.core.plans.plan_source import PlanFolder
from recycle.core.profile import Profile
from recycle.evaluate.hardware.core_keepalive import are_cores_migrated, cores_kept_awake
from recycle.evaluate.hardware.gpu_slices import slices
from recycle.evaluate.hardware.kills import DEATHS, measure_recoveries
from recycle.evaluate.hardware.race import Trial, run_race
from recycle.evaluate.hardware.setup import Setup
from recycle.evaluate.hardware.variants import variants
from recycle.profiling.rehearsal import rehearsal_plan, rehearse
from recycle.runtime.options import refuse_absent_device

SETUP, PROFILE = "setup.json", "profile.json"
FORMAT, VERSION = "recycle-cluster", 1
# Seconds from one kill to the next: enough to be back in.
_CYCLE_S = 4.0
Say = Callable[[str], None]


def begin_evaluation(folder: Path, setup: Setup) -> None:
    """Make the folder of a measurement, or see that it is of the same."""
    if (folder / SETUP).exists():
        if read_setup(folder) != setup:
            raise UserError(f"{folder} holds a measurement of something else: name another folder")
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / SETUP, json.dumps({"format": FORMAT, "version": VERSION, **setup.to_json()}, indent=1) + "\n")


def read_setup(folder: Path) -> Setup:
    data = read_json(folder / SETUP, FORMAT, VERSION)
    try:
        return Setup(**{key: value for key, value in data.items() if key not in ("format", "version")})
    except TypeError as problem:
        raise FileProblem(f"{folder / SETUP} is not a setup: {problem}") from None


@contextmanager
def hardware(setup: Setup) -> Iterator[None]:
    """What the setup computes on, for all of its parts: processes are forked from a server that starts in here, and once."""
    refuse_absent_device(setup.device)
    with slices(setup.num_workers) if setup.is_gpu else cores_kept_awake() if are_cores_migrated() else nullcontext():
        yield


def measure_profile(folder: Path, setup: Setup, say: Say) -> None:
    """Rehearse, unless that was done."""
    if (folder / PROFILE).exists():
        return
    job = setup.job(rehearsal_plan(setup.shape, is_split=True))
    found = rehearse(job, setup.model, progress=lambda number, unrest: say(f"round {number}: medians moved by {unrest:.1%}"))
    if not found.is_at_rest:
        say(f"medians still moved by {found.unrest:.1%} after {found.num_rounds} rounds: this machine is not quiet")
    write_text(folder / PROFILE, json.dumps(found.profile.to_json(), indent=1) + "\n")


def measure_race(folder: Path, setup: Setup, num_rounds: int, num_iterations: int, say: Say) -> None:
    """Run the race, or what is missing of it."""

    def progress(heat: Trial, done: int, of: int) -> None:
        say(f"turn {done} of {of}: {heat.variant} {heat.iteration_us / 1e3:.1f} ms, last loss {heat.losses[-1]:.4f}")

    profile = Profile.load(folder / PROFILE) if (folder / PROFILE).exists() else None
    run_race(folder, setup, variants(setup), num_rounds, num_iterations, progress, profile)


def measure_deaths(folder: Path, setup: Setup, num_kills: int, say: Say) -> None:
    """Kill workers, one after the other, unless that was done."""
    period_us = PlanFolder(folder / DEATHS).answer(frozenset()).plan.period_us
    measure_recoveries(folder, setup, num_kills, max(2, round(_CYCLE_S * 1e6 / period_us)), say)
