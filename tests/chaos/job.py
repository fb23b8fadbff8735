"""One small exact job as a process of its own, which goes on where an earlier one was stopped.

    python -m tests.chaos.job FOLDER 3,2,2 --steps 60

FOLDER/run is the run folder, FOLDER/result.json says the weights and losses when all steps are done.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import recycle
from recycle.core.errors import UserError
from recycle.core.files import write_text
from recycle.planner.live_planner import Planner
from recycle.runtime.checkpoint.files import find_checkpoints
from recycle.runtime.job import Job
from recycle.runtime.launch.local_launcher import launch
from recycle.runtime.options import CheckpointOptions, FailureOptions, TrainOptions
from tests.runtime.jobs import Numbers, adamw, loss
from tests.runtime.recovery_runs import ALL, SEED, problem, unhurried_stages

LEASE_S, RESTARTS = 1.0, 1000


def run(folder: Path, shape: tuple[int, int, int], steps: int, pause_s: float, every: int) -> None:
    out, wanted = folder / "run", problem(shape, ALL)
    resumes = bool(find_checkpoints(out / "checkpoints"))
    if not resumes:
        shutil.rmtree(out, ignore_errors=True)
    failures = FailureOptions(Planner(wanted), lease_s=LEASE_S, restarts=RESTARTS)
    options = TrainOptions(SEED, True, checkpoint=CheckpointOptions(every, resume=resumes), failures=failures)
    stages = unhurried_stages(shape[1], pause_s)
    job = Job(recycle.solve(wanted, "greedy"), stages, Numbers(), loss, adamw, steps, out=out, options=options)
    trained = launch(job, saves_if_stopped=True)
    facts = {"weights": trained.weights_sha256, "losses": list(trained.losses), "recoveries": len(trained.recoveries)}
    write_text(folder / "result.json", json.dumps(facts))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.01, help="how long each op waits, in seconds")
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    args = parser.parse_args()
    try:
        run(args.folder, args.shape, args.steps, args.pause, args.every)
    except UserError as problem:
        print(problem, file=sys.stderr)
        sys.exit(problem.exit_code)


if __name__ == "__main__":
    main()
