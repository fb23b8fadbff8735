"""What loggers call the numbers of steps, evaluations and recoveries, and how they refuse to work without their library."""

import math
from importlib.util import find_spec

from recycle.core.errors import UserError
from recycle.core.events.record import Evaluated, Recovered
from recycle.runtime.callbacks.protocol import StepMetrics

LOSS, NORM = "train/loss", "train/gradient_norm"
THROUGHPUT, ITERATION = "train/samples_per_second", "train/iteration_seconds"
EVALUATION = "evaluation/loss"
LOST, LIVE = "recovery/lost_seconds", "recovery/live_workers"


def step_values(step: StepMetrics) -> dict[str, float]:
    """The numbers of a step by their names; a loss or norm that is not finite is NaN, a number that is not known is left out."""
    known = {LOSS: _number(step.loss), NORM: _number(step.gradient_norm)}
    if step.iteration_s is not None:
        known[ITERATION] = step.iteration_s
    if step.samples_per_s is not None:
        known[THROUGHPUT] = step.samples_per_s
    return known


def evaluation_values(evaluation: Evaluated) -> dict[str, float]:
    return {EVALUATION: _number(evaluation.loss)}


def recovery_values(recovery: Recovered) -> dict[str, float]:
    return {LOST: recovery.lost_us / 1e6, LIVE: float(recovery.num_live)}


def recovery_text(recovery: Recovered) -> str:
    """A recovery in a few words."""
    workers = ", ".join(recovery.workers)
    what = f"{'joined' if recovery.joins else 'lost'} {workers}" if workers else "another plan"
    return f"step {recovery.iteration + 1}: {what} ({recovery.cause})"


def refuse_missing(what: str, module: str, package: str) -> None:
    """Raise if the library of a logger is not installed."""
    try:
        is_there = find_spec(module) is not None
    except (ImportError, ValueError):
        is_there = False
    if not is_there:
        raise UserError(f"a log for {what} needs the Python package {package}, which is not installed: pip install {package}")


def _number(value: float | None) -> float:
    return math.nan if value is None else value
