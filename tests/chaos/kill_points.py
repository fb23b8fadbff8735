"""Every kill point of a small run, on real processes: each worker is killed once and hung once at each of its points in a step.

Points are the ops of its row, the reduction, its optimizer step, its checkpoint, and the recovery from another worker's death.

    python -m tests.chaos.kill_points                   all of them, a few minutes
    python -m tests.chaos.kill_points --sample 8        some, drawn by --seed

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
            found += [Point((f"{place}:{at}",), at) for at in ("reduce", "step", "checkpoint")]
            other = next(each.worker for each in plan.rows if each.worker.stage != row.worker.stage)
            found.append(Point((f"kill {other}@{STEP}", f"{place}:recovery"), "recovery"))
    return found


@cache
def twin() -> tuple[str, list[float]]:
    return undisturbed(SHAPE, STEPS)


def run_point(point: Point) -> Outcome:
    begin_s, problem = time.monotonic(), ""
    with TemporaryDirectory() as folder:
        try:
            run = Run(SHAPE, *point.lines, steps=STEPS, lease_s=LEASE_S, out=Path(folder) / "run", every=EVERY)
            if run.trained.weights_sha256 != twin()[0] or list(run.trained.losses) != twin()[1]:
                problem = "other weights or losses"
            elif recycle.load(run.stages, Path(folder) / "run") != STEPS:
                problem = "the last checkpoint is missing"
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
    parser.add_argument("--seed", type=int, default=0, help="which points (default: 0)")
    args = parser.parse_args()
    warm_context()
    chosen = points()
    if args.sample:
        chosen = Random(args.seed).sample(chosen, args.sample)
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
