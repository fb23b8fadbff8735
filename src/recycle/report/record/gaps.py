"""What is missing in the files of a run: steps, the end of the record, plans. A report says so, and does not hide it."""

import json
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from pathlib import Path

import numpy as np

from recycle.core.events.record_file import PLANS, SUMMARY
from recycle.report.record.run_columns import Ops, RunRecord

_MOST_TOLD = 3


def step_gaps(run: RunRecord, num_steps: object) -> list[str]:
    """Return a clause for steps that the record lacks; `num_steps` is the number of steps that the summary has, if any."""
    if not run.steps:
        return []
    last = run.steps[-1].iteration
    missing = set(range(last)).difference(step.iteration for step in run.steps)
    gaps = [f"it has no {steps_text(missing)}"] if missing else []
    if isinstance(num_steps, int) and num_steps > last + 1:
        gaps.append(f"it ends with step {last + 1}, but {SUMMARY} is of a run of {num_steps} steps")
    return gaps


def iterations_without_plan(counted: Ops, plan_of: Mapping[int, Path]) -> set[int]:
    """Return the iterations that were executed by other workers than those of their plan: the file of their own plan is missing.

    `plan_of` has the plan file of each iteration whose ops are all in `counted`.
    """
    rows = {path: _workers_in(path) for path in set(plan_of.values())}
    pairs = np.unique(np.stack([counted.iteration, counted.worker], axis=1), axis=0)
    workers: dict[int, set[str]] = {}
    for iteration, worker in pairs.tolist():
        workers.setdefault(iteration, set()).add(counted.workers[worker])
    return {iteration for iteration, path in plan_of.items() if workers[iteration] != rows[path]}


def plan_gaps(iterations: Collection[int]) -> list[str]:
    """Return a clause for iterations whose plan is missing."""
    return [f"the plan of {steps_text(iterations)} is missing in {PLANS}/"] if iterations else []


def steps_text(iterations: Iterable[int]) -> str:
    """Name the steps of some iterations: `steps 3 to 5 and 9`; steps count from 1."""
    numbered = enumerate(sorted(iterations))
    runs = [[number for _, number in run] for _, run in groupby(numbered, key=lambda pair: pair[1] - pair[0])]
    texts = [f"{run[0] + 1}" if len(run) == 1 else f"{run[0] + 1} to {run[-1] + 1}" for run in runs]
    shown = [*texts[:_MOST_TOLD], *([f"{len(texts) - _MOST_TOLD} more gaps"] if len(texts) > _MOST_TOLD else [])]
    return ("step " if texts == shown and len(runs) == len(runs[0]) == 1 else "steps ") + " and ".join(shown)


def _workers_in(path: Path) -> set[str]:
    """The workers of a plan file; none if it cannot be read."""
    try:
        return set(json.loads(path.read_bytes())["rows"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()
