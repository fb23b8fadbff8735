"""Every kill point of a small run, on real processes: each worker is killed once and hung once at each of its points in a step.

Points are the ops of its row, the reduction, its optimizer step, its checkpoint, the recovery from another worker's death, and
the copy of its stage's state, which it sends to a peer that comes back, or receives. Pairs of points are drawn by --seed.

    python -m tests.chaos.kill_points                   all of them, a few minutes
    python -m tests.chaos.kill_points --sample 8        some, drawn by --seed
    python -m tests.chaos.kill_points --pairs 50        and so many pairs (default: 24)

Every run must end with the weights of a run that nobody disturbed. The last lines are a table.
"""

import argparse
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import recycle
from tests.processes import deadline
from tests.runtime.recovery_runs import ALL, Run, problem, undisturbed
from tests.warm_processes import warm_context

SHAPE, STEPS, STEP, EVERY, LEASE_S = (2, 2, 3), 6, 3, 3, 1.0
LIMIT_S = 120.0


@dataclass(frozen=True)
class Point:
    """A failure of a worker: its lines of a failure script, and the kind of its place."""

    lines: tuple[str, ...]
    kind: str

    @property
    def worker(self) -> str:
        return self.lines[-1].split()[1].split("@")[0]

    def __str__(self) -> str:
        return ", ".join(self.lines)


@dataclass(frozen=True)
class Outcome:
    point: Point
    took_s: float
    problem: str = ""


def points() -> list[Point]:
    """All points of all workers, killed and hung."""
    found = []
    plan = recycle.solve(problem(SHAPE, ALL), "greedy")
    for action in ("kill", "hang"):
        for row in sorted(plan.rows, key=lambda row: row.worker):
            place = f"{action} {row.worker}@{STEP}"
            found += [Point((f"{place}:{slot.op}",), "op") for slot in plan.slots(row)]
            # The first peer of a stage writes its checkpoints.
            places = ("reduce", "step", "checkpoint") if row.worker.pipeline == 0 else ("reduce", "step")
            found += [Point((f"{place}:{at}",), at) for at in places]
            other = next(each.worker for each in plan.rows if each.worker.stage != row.worker.stage)
            found.append(Point((f"kill {other}@{STEP}", f"{place}:recovery"), "recovery"))
            peer = next(each.worker for each in plan.rows if each.worker.stage == row.worker.stage and each != row)
            for gone, kind in ((peer, "send"), (row.worker, "receive")):
                lines = (f"kill {gone}@1", f"rejoin {gone}@{STEP}", f"{place}:transfer")
                found.append(Point(lines, kind))
    return found


def pairs(num: int, random: Random) -> list[Point]:
    """Two workers, each killed or hung at a point of its own."""
    single = [point for point in points() if len(point.lines) == 1]
    found = list[Point]()
    while len(found) < num:
        one, other = random.sample(single, 2)
        if one.worker != other.worker:
            found.append(Point((*one.lines, *other.lines), "pair"))
    return found


@cache
def twin(steps: int) -> tuple[str, list[float]]:
    return undisturbed(SHAPE, steps)


def run_point(point: Point) -> Outcome:
    begin_s, problem = time.monotonic(), ""
    with TemporaryDirectory() as folder:
        try:
            # A worker that comes back must have loaded before the run is over.
            steps, pause_s = (4 * STEPS, 0.02) if any("rejoin" in line for line in point.lines) else (STEPS, 0.0)
            out = Path(folder) / "run"
            run = Run(SHAPE, *point.lines, steps=steps, lease_s=LEASE_S, pause_s=pause_s, out=out, every=EVERY)
            weights, losses = twin(steps)
            num_failures = sum(not line.startswith("rejoin") for line in point.lines)
            if run.trained.weights_sha256 != weights or list(run.trained.losses) != losses:
                problem = "other weights or losses"
            elif recycle.load(run.stages, out) != steps:
                problem = "the last checkpoint is missing"
            elif len(run.lost) != num_failures and point.kind != "pair":  # the second may be at an op that moves with the first
                problem = f"{num_failures} failures were asked for, {len(run.lost)} came"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    return Outcome(point, time.monotonic() - begin_s, problem)


def table(outcomes: list[Outcome]) -> str:
    rows = defaultdict(list)
    for outcome in outcomes:
        rows[outcome.point.lines[-1].split()[0], outcome.point.kind].append(outcome)
    lines = ["action  place        runs  same weights  longest s"]
    for (action, kind), found in sorted(rows.items()):
        num_same = sum(not one.problem for one in found)
        lines.append(f"{action:7} {kind:12} {len(found):4}  {num_same:12}  {max(one.took_s for one in found):9.1f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill and hang every worker at every point of a step, once each.")
    parser.add_argument("--sample", type=int, default=0, help="so many points only (default: all)")
    parser.add_argument("--pairs", type=int, default=24, help="so many pairs of points, too (default: 24)")
    parser.add_argument("--seed", type=int, default=0, help="which points (default: 0)")
    args = parser.parse_args()
    warm_context()
    random = Random(args.seed)
    chosen = points() + pairs(args.pairs, random)
    if args.sample:
        chosen = random.sample(chosen, args.sample)
    outcomes = []
    for number, point in enumerate(chosen, 1):
        with deadline(LIMIT_S):
            outcomes.append(run_point(point))
        said = outcomes[-1].problem or "same weights"
        print(f"{number} of {len(chosen)}  {outcomes[-1].took_s:5.1f} s  {point}: {said}", file=sys.stderr, flush=True)
    print(table(outcomes))
    return 1 if any(outcome.problem for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
