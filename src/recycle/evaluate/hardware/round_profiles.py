"""What ops cost while a race goes on: its workers rehearse in each round, between the turns that count.

So a slow hour of the machine is not taken for a slow plan, and a slow minute not for a slow hour.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from recycle.core.files import write_text
from recycle.core.profile import Profile
from recycle.evaluate.hardware.contenders import ContenderTurn
from recycle.evaluate.hardware.setup import Setup
from recycle.profiling.plan_runner import WeightState
from recycle.profiling.rehearsal import RehearsalFits, RehearsalPlay
from recycle.profiling.worker_pool import WorkerPool
from recycle.runtime.compute.stage_costs import StageBytes

ROUNDS = "rounds"


def round_path(folder: Path, number: int) -> Path:
    return folder / ROUNDS / f"profile-{number}.json"


class Rehearsal:
    """The rehearsal of one round: plays that are done one by one, and a profile when all are. Sizes are as they are known."""

    def __init__(self, folder: Path, setup: Setup, number: int, known: Profile) -> None:
        self._path, self._known = round_path(folder, number), known
        self._readings, self._num_done = RehearsalFits(setup.shape), 0

    @property
    def plays(self) -> Sequence[RehearsalPlay]:
        return self._readings.plays

    def play(self, play: RehearsalPlay, crew: WorkerPool, turn: int) -> None:
        """Have one of the plays done, as a turn of its own; after the last one, write the profile."""
        pipelines = range(play.plan.problem.shape.num_pipelines)
        ran = crew.ask(ContenderTurn(turn, "rehearsal", play.num_iterations, play.plan, pipelines))
        play.add({worker: told.played for worker, told in ran.items()})
        self._num_done += 1
        if self._num_done == len(self.plays):
            self._write()

    def _write(self) -> None:
        known = self._known
        assert known.taken is not None, "a profile that was measured knows on what"
        sizes = [StageBytes(one.activation_bytes, one.weight_held_bytes, one.output_bytes) for one in known.stages]
        states = {stage: WeightState(one.static_bytes, one.gradient_bytes) for stage, one in enumerate(known.stages)}
        made = self._readings.profile(sizes, states, known.stage_link.latency_us, known.taken)
        write_text(self._path, json.dumps(made.to_json(), indent=1) + "\n")


def round_profiles(folder: Path) -> dict[int, Profile]:
    """The profiles of all rounds that have one."""
    paths = (folder / ROUNDS).glob("profile-*.json")
    return {int(path.stem.removeprefix("profile-")): Profile.load(path) for path in sorted(paths)}
