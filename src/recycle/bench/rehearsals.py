"""What ops cost while a race goes on: its workers rehearse at the start of each round.

So a slow hour of the machine is not taken for a slow plan.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from recycle.bench.setup import Setup
from recycle.bench.sides import Turn
from recycle.core.cluster import Worker
from recycle.core.files import write_text
from recycle.core.plan import Plan
from recycle.core.profile import Profile
from recycle.runtime.crew import Crew
from recycle.runtime.measure import StageBytes
from recycle.runtime.player import Played, State
from recycle.runtime.rehearsal import Readings

ROUNDS = "rounds"


def round_path(folder: Path, number: int) -> Path:
    return folder / ROUNDS / f"profile-{number}.json"


def rehearse_round(folder: Path, setup: Setup, crew: Crew, number: int, turns: Iterator[int], known: Profile) -> None:
    """Rehearse, in the next of all turns, and keep the profile of this round; sizes are as they are known."""
    readings = Readings(setup.shape)

    def play(plan: Plan, num_iterations: int) -> dict[Worker, Played]:
        pipelines = range(plan.problem.shape.num_pipelines)
        ran = crew.ask(Turn(next(turns), "rehearsal", num_iterations, plan, pipelines))
        return {worker: told.played for worker, told in ran.items()}

    readings.add_round(play)
    assert known.taken is not None, "a profile that was measured knows on what"
    sizes = [StageBytes(one.activation_bytes, one.weight_held_bytes, one.output_bytes) for one in known.stages]
    states = {stage: State(one.static_bytes, one.gradient_bytes) for stage, one in enumerate(known.stages)}
    made = readings.profile(sizes, states, known.stage_link.latency_us, known.taken)
    write_text(round_path(folder, number), json.dumps(made.to_json(), indent=1) + "\n")


def round_profiles(folder: Path) -> dict[int, Profile]:
    """The profiles of all rounds that have one."""
    paths = (folder / ROUNDS).glob("profile-*.json")
    return {int(path.stem.removeprefix("profile-")): Profile.load(path) for path in sorted(paths)}
