"""`Trained`: the summary of a finished run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from recycle.core.events.record import Evaluated, Recovered


@dataclass(frozen=True, slots=True)
class Trained:
    """The summary of a run that has ended. `losses` has the loss of every step, also of those before the run was resumed.

    Times are those of a median iteration of this run, 0 if there was none; `planned_iteration_us` is the plan's period at the
    measured speed of the ops. `num_begun_again` counts the iterations that began again after a step was taken back.
    `stopped_because` says why the run ended before its last step, if it did so by its own options. `data_wait_shares` are the
    shares of each worker's time in which its ops waited for data.
    `saved_steps` is the number of steps of the newest checkpoint, 0 if there is none, None if the run has no folder. `out` is the
    run folder, as `recycle.train` returns it.
    """

    num_steps: int
    losses: tuple[float, ...]
    weights_sha256: str
    samples_per_s: float
    iteration_us: int
    planned_iteration_us: int
    start_us: int
    peak_memory_bytes: Mapping[str, int]
    activation_bytes: Mapping[str, int]
    planned_activation_bytes: Mapping[str, int]
    static_bytes: Mapping[str, int]
    planned_static_bytes: Mapping[str, int]
    dead: tuple[str, ...]
    num_begun_again: int
    warnings: tuple[str, ...]
    recoveries: tuple[Recovered, ...] = ()
    saved_steps: int | None = None
    evaluations: tuple[Evaluated, ...] = ()
    stopped_because: str = ""
    data_wait_shares: Mapping[str, float] = field(default_factory=dict)
    out: Path | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": self.num_steps,
            "losses": [finite(loss) for loss in self.losses],
            "weights_sha256": self.weights_sha256,
            "samples_per_s": round(self.samples_per_s, 3),
            "iteration_us": self.iteration_us,
            "planned_iteration_us": self.planned_iteration_us,
            "start_us": self.start_us,
            "peak_memory_bytes": dict(self.peak_memory_bytes),
            "activation_bytes": dict(self.activation_bytes),
            "planned_activation_bytes": dict(self.planned_activation_bytes),
            "static_bytes": dict(self.static_bytes),
            "planned_static_bytes": dict(self.planned_static_bytes),
            "workers": len(self.peak_memory_bytes),
            "dead": list(self.dead),
            "begun_again": self.num_begun_again,
            "warnings": list(self.warnings),
            "saved_steps": self.saved_steps,
            "evaluations": [{"step": each.num_steps, "loss": each.loss} for each in self.evaluations],
            "stopped_because": self.stopped_because,
            "data_wait_shares": dict(self.data_wait_shares),
            "recoveries": [recovery.to_json() for recovery in self.recoveries],
        }


def usual_us(times_us: Sequence[int]) -> int:
    """The median; the first iteration, in which all warm up, counts only if there is no other."""
    return round(median(times_us[1:] or times_us)) if times_us else 0


def finite(value: float) -> float | None:
    """The number, or None for one that JSON does not have."""
    return value if math.isfinite(value) else None
