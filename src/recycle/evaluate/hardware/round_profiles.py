"""Profiles of the rounds of a race: its workers rehearse in each round, between the turns that are measured.

So a slow hour of the machine is not mistaken for a slow plan, and a slow minute not for a slow hour.
"""

import json
from dataclasses import replace
from pathlib import Path

from recycle.core.files import write_text
from recycle.core.profile import Profile
from recycle.evaluate.hardware.contenders import ContenderTurn
from recycle.evaluate.hardware.setup import Setup
from recycle.profiling.plan_runner import StateBytes
from recycle.profiling.rehearsal import RehearsalFits, RehearsalRun
from recycle.profiling.worker_pool import WorkerPool
from recycle.runtime.compute.stage_bytes import StageBytes

ROUNDS = "rounds"


def round_path(folder: Path, number: int) -> Path:
    return folder / ROUNDS / f"profile-{number}.json"


class Rehearsal:
    """The rehearsal of one round: runs one by one, and a profile after the last one. Its sizes are those of a known profile."""

    def __init__(self, folder: Path, setup: Setup, number: int, known: Profile) -> None:
        self._path, self._known = round_path(folder, number), known
        self._fits, self._num_done = RehearsalFits(setup.shape), 0
        self.runs = self._fits.runs

    def do(self, run: RehearsalRun, pool: WorkerPool, turn: int) -> None:
        """Do one of the runs, as a turn of its own; after the last one, write the profile."""
        pipelines = range(run.plan.problem.shape.num_pipelines)
        results = pool.ask(ContenderTurn(turn, "rehearsal", run.num_iterations, run.plan, pipelines))
        run.add({worker: result.run for worker, result in results.items()})
        self._num_done += 1
        if self._num_done == len(self.runs):
            self._write()

    def _write(self) -> None:
        known = self._known
        assert known.taken is not None, "a measured profile says on what it was measured"
        sizes = [StageBytes(one.activation_bytes, one.weight_held_bytes, one.output_bytes) for one in known.stages]
        states = {stage: StateBytes(one.static_bytes, one.gradient_bytes) for stage, one in enumerate(known.stages)}
        made = replace(self._fits.profile(sizes, states, known.stage_link.latency_us, known.taken), layers=known.layers)
        write_text(self._path, json.dumps(made.to_json(), indent=1) + "\n")


def round_profiles(folder: Path) -> dict[int, Profile]:
    """The profiles of all rounds that have one."""
    paths = (folder / ROUNDS).glob("profile-*.json")
    return {int(path.stem.removeprefix("profile-")): Profile.load(path) for path in sorted(paths)}
