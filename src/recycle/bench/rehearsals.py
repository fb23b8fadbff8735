"""What ops cost while a race goes on: its workers rehearse at the start of each round.

So a slow hour of the machine is not taken for a slow plan.
"""

import json
from pathlib import Path

from recycle.bench.setup import Setup
from recycle.bench.sides import Turn
from recycle.core.cluster import Shape
from recycle.core.files import write_text
from recycle.core.plan import Plan
from recycle.core.profile import Profile
from recycle.runtime.crew import Crew
from recycle.runtime.measure import StageBytes
from recycle.runtime.player import State
from recycle.runtime.reading import Reading
from recycle.runtime.rehearsal import rehearsal_plan

ROUNDS = "rounds"
NUM_TURNS = 3
_WARM_UP, _ITERATIONS = 2, 4


def round_path(folder: Path, number: int) -> Path:
    return folder / ROUNDS / f"profile-{number}.json"


def rehearse_round(folder: Path, setup: Setup, crew: Crew, number: int, first: int, known: Profile) -> None:
    """Rehearse in turns from number `first` on, and keep the profile of this round; sizes are as they are known."""
    lone = Shape(1, setup.stages, setup.microbatches)
    together, alone = Reading(setup.shape), Reading(lone)
    turns: list[tuple[Reading, Plan]] = [
        (together, rehearsal_plan(setup.shape, is_split=False)),
        (together, rehearsal_plan(setup.shape, is_split=True)),
        (alone, rehearsal_plan(lone, is_split=True)),
    ]
    for place, (reading, plan) in enumerate(turns):
        pipelines = range(plan.problem.shape.num_pipelines)
        ran = crew.ask(Turn(first + place, "rehearsal", _WARM_UP + _ITERATIONS, plan, pipelines))
        reading.add({worker: told.played for worker, told in ran.items() if told.ends_us}, _WARM_UP)
    assert known.taken is not None, "a profile that was measured knows on what"
    sizes = [StageBytes(one.activation_bytes, one.weight_held_bytes, one.output_bytes) for one in known.stages]
    states = {stage: State(one.static_bytes, one.gradient_bytes) for stage, one in enumerate(known.stages)}
    made = together.profile(sizes, states, known.stage_link.latency_us, known.taken, alone)
    write_text(round_path(folder, number), json.dumps(made.to_json(), indent=1) + "\n")


def round_profiles(folder: Path) -> dict[int, Profile]:
    """The profiles of all rounds that have one."""
    paths = (folder / ROUNDS).glob("profile-*.json")
    return {int(path.stem.removeprefix("profile-")): Profile.load(path) for path in sorted(paths)}
