"""Random faults from outside on real processes: kill, or stop and continue, any process of a job at any time.

    python -m tests.chaos.external_faults --num 500               that many faults over jobs of six shapes
    python -m tests.chaos.external_faults --num 500 --jobs 8      eight jobs at a time, on a machine with many cores

The victim is drawn among the kinds of processes that there are: launcher, coordinator, planner, workers, fork server, resource
tracker. A job whose launcher was killed, or that ended with an error, is started again and resumes, as a user would do. Each job
must end with the weights and losses of a twin that nobody disturbs. The last lines are a table.
"""

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests.chaos.job_processes import JobProcess, JobSession, hit
from tests.runtime.recovery_runs import undisturbed

SHAPES = ((2, 2, 2), (3, 2, 2), (2, 3, 2), (4, 1, 2), (3, 1, 3), (5, 2, 2))
STEPS, FAULTS_A_JOB = 200, 10
LIMIT_S, MOST_STARTS = 900.0, 40


@dataclass
class Outcome:
    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    problem: str = ""
    num_starts: int = 0
    errors: list[str] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def shape(self) -> tuple[int, int, int]:
        return SHAPES[self.seed % len(SHAPES)]


def run_job(seed: int, num: int, longest_stop_s: float) -> Outcome:
    """Run one job with faults to its end."""
    outcome, random = Outcome(seed), Random(seed)
    begin_s = time.monotonic()
    with TemporaryDirectory() as name:
        folder = Path(name)
        words = (",".join(map(str, outcome.shape)), "--steps", str(STEPS))
        with JobSession(folder, *words) as job:
            outcome.problem = _disturb(job, random, num, longest_stop_s, outcome.faults, begin_s + LIMIT_S)
            outcome.num_starts, outcome.errors = job.num_starts, job.errors
            if outcome.problem:
                outcome.problem += f"; the last lines: {job.log()[-600:]}"
        if not outcome.problem:
            result = json.loads((folder / "result.json").read_text())
            if (result["weights"], result["losses"]) != twin(outcome.shape):
                outcome.problem = "other weights or losses"
    outcome.took_s = time.monotonic() - begin_s
    return outcome


def _disturb(job: JobSession, random: Random, num: int, longest_stop_s: float, done: Counter[str], deadline_s: float) -> str:
    """Hit processes of the job until `num` faults are done, and wait for its result; return the problem, if there is one."""
    next_s = time.monotonic() + 1.0
    while not job.has_result or job.process.poll() is None:
        if time.monotonic() > deadline_s:
            return f"no result after {LIMIT_S:.0f} s"
        if job.process.poll() is not None and not job.has_result:
            if job.num_starts >= MOST_STARTS:
                return f"it was started {MOST_STARTS} times"
            job.start()
        if time.monotonic() >= next_s and done.total() < num and not job.has_result:
            next_s = time.monotonic() + random.expovariate(1 / 1.5)
            victim = draw(job.processes(), random)
            if victim is not None:
                seconds = 0.0 if random.random() < 0.5 else 0.1 * (longest_stop_s / 0.1) ** random.random()
                done[f"{'stop' if seconds else 'kill'} {victim.kind}"] += 1
                hit(victim.pid, seconds)
        time.sleep(0.05)
    return ""


def draw(processes: list[JobProcess], random: Random) -> JobProcess | None:
    """A random process of a random kind, once the job has workers."""
    kinds = sorted({process.kind for process in processes})
    if "worker" not in kinds:
        return None
    kind = random.choice(kinds)
    return random.choice([process for process in processes if process.kind == kind])


@cache
def twin(shape: tuple[int, int, int]) -> tuple[str, list[float]]:
    weights, losses = undisturbed(shape, STEPS)
    return weights, losses


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill and stop processes of jobs at random.")
    parser.add_argument("--num", type=int, default=500, help="how many faults (default: 500)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--longest-stop", type=float, default=60.0, help="the longest stop in seconds (default: 60)")
    parser.add_argument("--jobs", type=int, default=1, help="how many jobs at a time (default: 1)")
    args = parser.parse_args()
    for shape in SHAPES:
        twin(shape)
    outcomes, seeds, total = list[Outcome](), count(args.first), Counter[str]()
    with ThreadPoolExecutor(args.jobs) as pool:
        pending = {pool.submit(run_job, next(seeds), FAULTS_A_JOB, args.longest_stop) for _ in range(args.jobs)}
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for outcome in (future.result() for future in done):
                outcomes.append(outcome)
                total += outcome.faults
                said = outcome.problem or f"same weights, {outcome.num_starts} starts"
                head = f"{total.total()} of {args.num} faults; seed {outcome.seed}, {outcome.shape}, {outcome.took_s:.0f} s"
                print(f"{head}: {said}", file=sys.stderr, flush=True)
                if total.total() + FAULTS_A_JOB * len(pending) < args.num:
                    pending.add(pool.submit(run_job, next(seeds), FAULTS_A_JOB, args.longest_stop))
    problems = [outcome for outcome in outcomes if outcome.problem]
    print(f"jobs     {len(outcomes)} of {len(SHAPES)} shapes, the longest {max(outcome.took_s for outcome in outcomes):.0f} s")
    errors = [error for outcome in outcomes for error in outcome.errors]
    print(f"starts   {sum(outcome.num_starts for outcome in outcomes)}, {len(errors)} after an end with an error")
    for error, number in Counter(error.splitlines()[-1][:160] for error in errors).most_common(8):
        print(f"         {number} x {error}")
    print(f"faults   {total.total()}: " + ", ".join(f"{number} {name}" for name, number in total.most_common()))
    print(f"failed   {len(problems)}" + "".join(f"\n  seed {each.seed}: {each.problem}" for each in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
