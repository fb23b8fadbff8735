"""The epochs of a recorded run, and the comparison of their measured times with simulated ones, as JSON and as tables.

An epoch is a sequence of steps by one plan. Its first step starts with an empty pipeline, so it is compared by itself. Steps that
were repeated from a checkpoint belong to two epochs and count in both; ops in vain count nowhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from recycle.core.cluster import Shape, Worker
from recycle.core.events.op_columns import OPTIMIZER, REDUCE
from recycle.core.events.record import Recovered
from recycle.core.op import Op
from recycle.core.units import format_us
from recycle.report.record.hindsight import ROLLED_BACK
from recycle.report.record.recovery_text import format_ms, who
from recycle.report.record.run_columns import Bools, Ints, Ops, RunRecord, completed_us
from recycle.report.record.tables import aligned

_MOST_NAMED = 4
_MOST_ROWS = 24
_MARGIN = 11
_EPOCH_HEAD = ["steps", "dead", "iteration simulated", "measured", "ratio", "first step simulated", "measured", "ratio"]
_PAUSE_HEAD = ["pause", "step", "simulated", "measured", "ratio"]


@dataclass(frozen=True, eq=False)
class Epoch:
    """Consecutive steps by one plan, from `begin_us` on, after the recovery `recovered`; None where the run was started.

    `iterations` were applied, and ended at `ends_us`. `ops` belong to the complete iterations, which may be fewer: the record
    lacks the last ops of a worker that died.
    """

    recovered: Recovered | None
    begin_us: int
    iterations: tuple[int, ...]
    ends_us: tuple[int, ...]
    ops: Ops

    @property
    def times_us(self) -> list[int]:
        """The time of each step, from the end of the step before."""
        return np.diff(self.ends_us, prepend=self.begin_us).tolist()

    @cached_property
    def complete(self) -> Ints:
        """The iterations of which the record holds every op."""
        return np.unique(self.ops.iteration)

    @cached_property
    def rows(self) -> dict[Worker, list[Op]]:
        """The ops of each live worker in an iteration, in order of time."""
        rows: dict[Worker, list[Op]] = {Worker.parse(name): [] for name in self.ops.workers}
        for event in self.ops.events([int(self.complete[0])]):
            if event.op not in (REDUCE, OPTIMIZER):
                rows[Worker.parse(event.worker)].append(Op.parse(event.op))
        return rows

    def dead(self, shape: Shape) -> frozenset[Worker]:
        """The places without a live worker."""
        return frozenset(worker for worker in shape.workers() if worker not in self.rows)

    def spans_us(self, rows: Mapping[Worker, Sequence[Op]]) -> tuple[Ints, Ints]:
        """Start and end of each op, by complete iteration and by the op's number in `rows`, one row after the other."""
        names = [(str(worker), str(op)) for worker, row in rows.items() for op in row]
        ops, number = self.ops, self.ops.look_up({name: number for number, name in enumerate(names)})
        is_op = number >= 0
        where = np.searchsorted(self.complete, ops.iteration[is_op]), number[is_op]
        starts, ends = (np.zeros((len(self.complete), len(names)), dtype=np.int64) for _ in range(2))
        starts[where], ends[where] = ops.start_us[is_op], ops.end_us[is_op]
        return starts, ends

    def reduced_us(self, num_stages: int) -> Ints:
        """The time of each reduction, by complete iteration and stage, from the arrival of its last worker."""
        chosen, where = self._find(REDUCE)
        arrived, ended = (np.zeros((len(self.complete), num_stages), dtype=np.int64) for _ in range(2))
        np.maximum.at(arrived, where, self.ops.start_us[chosen])
        np.maximum.at(ended, where, self.ops.end_us[chosen])
        return ended - arrived

    def stepped_us(self, num_stages: int) -> Ints:
        """The time of each optimizer step, by complete iteration and stage: the mean over its workers.

        A worker may compute a step in two parts.
        """
        chosen, where = self._find(OPTIMIZER)
        workers = self.ops.iteration[chosen] * len(self.ops.workers) + self.ops.worker[chosen]
        _, firsts = np.unique(workers, return_index=True)
        sums, counts = (np.zeros((len(self.complete), num_stages), dtype=np.int64) for _ in range(2))
        np.add.at(sums, where, (self.ops.end_us - self.ops.start_us)[chosen])
        np.add.at(counts, tuple(each[firsts] for each in where), 1)
        return sums // np.maximum(1, counts)

    def _find(self, what: str) -> tuple[Bools, tuple[Ints, Ints]]:
        """Return which events are of this kind, and their complete iterations and stages."""
        ops = self.ops
        chosen: Bools = np.array([text == what for text in ops.texts])[ops.what]
        return chosen, (np.searchsorted(self.complete, ops.iteration[chosen]), ops.stages[ops.worker[chosen]])


class _Boundary(NamedTuple):
    """The start of an epoch: its ops start at `from_us` or later, and it trains from `begin_us` on."""

    from_us: int
    begin_us: int
    recovered: Recovered | None = None


def split_epochs(run: RunRecord, shape: Shape) -> list[Epoch]:
    """Return the epochs of a run with a complete iteration, in order of time."""
    if len(run.ops) == 0:
        return []
    boundaries = _boundaries(run)
    firsts_us = [boundary.from_us for boundary in boundaries]
    number = np.searchsorted(firsts_us, run.ops.start_us, side="right") - 1
    counts = ~run.ops.in_vain | run.discarded  # a discarded iteration counts in the epoch that completed it
    epochs = []
    for index, (boundary, last_us) in enumerate(zip(boundaries, [*firsts_us[1:], None], strict=True)):
        ops = run.ops.chosen(counts & (number == index))
        if ends := completed_us(ops, shape):
            kept = ops.chosen(np.isin(ops.iteration, list(ends)))
            ends |= {one.iteration: one.at_us for one in run.steps if boundary.from_us < one.at_us <= (last_us or one.at_us)}
            iterations = tuple(sorted(ends))
            epochs.append(Epoch(boundary.recovered, boundary.begin_us, iterations, tuple(ends[one] for one in iterations), kept))
    return epochs


def late_recoveries(run: RunRecord) -> list[Recovered]:
    """The recoveries after the first op of the record."""
    return [boundary.recovered for boundary in _boundaries(run) if boundary.recovered is not None]


def in_flight_us(run: RunRecord) -> int:
    """The discarded time since the last step before each recovery: repeated steps count in their epochs."""
    ends_us = {one.at_us for one in late_recoveries(run)}
    spells = (spell for spell in run.spells if spell.state == "redo" and spell.cause != ROLLED_BACK)
    return sum(spell.length_us for spell in spells if spell.end_us in ends_us)


def _boundaries(run: RunRecord) -> list[_Boundary]:
    """Return the starts of the epochs: the first op, each restart of the run, each recovery."""
    first_us = int(run.ops.start_us.min())
    starts = [_Boundary(spell.end_us, spell.end_us) for spell in run.spells if spell.cause == "start"]
    # From the end of the abort on: the first op of the new epoch may start before the recovery is recorded as ended.
    recoveries = [_Boundary(one.at_us + one.detect_us + one.abort_us, one.end_us, one) for one in run.recoveries]
    later = [boundary for boundary in starts + recoveries if boundary.from_us > first_us]
    return [_Boundary(first_us, first_us), *sorted(later, key=lambda boundary: boundary.from_us)]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of consecutive steps: the first, in which the pipeline fills, the median of the others, and the sum."""

    first_us: int
    iteration_us: int | None  # None if the first step is the only one
    total_us: int

    @staticmethod
    def of(times_us: Sequence[int]) -> "StepTimes":
        later = times_us[1:]
        return StepTimes(times_us[0], round(median(later)) if later else None, sum(times_us))

    def to_json(self) -> dict[str, Any]:
        return {"first": self.first_us, "iteration": self.iteration_us, "total": self.total_us}


@dataclass(frozen=True, slots=True)
class EpochComparison:
    """The steps of an epoch, predicted and measured; `is_planned` if the planner makes the plan that was executed."""

    first_step: int
    last_step: int
    dead: tuple[Worker, ...]
    is_planned: bool
    predicted: StepTimes
    measured: StepTimes

    @property
    def num_steps(self) -> int:
        return self.last_step - self.first_step + 1

    @property
    def ratio(self) -> float | None:
        """The measured over the predicted iteration time; that of the first step if it is the only one."""
        if self.measured.iteration_us is None or self.predicted.iteration_us is None:
            return _ratio(self.measured.first_us, self.predicted.first_us)
        return _ratio(self.measured.iteration_us, self.predicted.iteration_us)

    def to_json(self) -> dict[str, Any]:
        return {
            "first_step": self.first_step,
            "last_step": self.last_step,
            "steps": self.num_steps,
            "dead": list(map(str, self.dead)),
            "planned": self.is_planned,
            "predicted_us": self.predicted.to_json(),
            "measured_us": self.measured.to_json(),
            "ratio": self.ratio,
        }


@dataclass(frozen=True, slots=True)
class PauseComparison:
    """The pause of a recovery, measured and predicted by part. Repeated work is no part of it."""

    recovered: Recovered
    predicted_parts_us: Mapping[str, int] = field(default_factory=dict)

    @property
    def predicted_us(self) -> int:
        return sum(self.predicted_parts_us.values())

    @property
    def measured_us(self) -> int:
        return self.recovered.lost_us - self.recovered.redo_us

    def to_json(self) -> dict[str, Any]:
        measured = {part: time for part, time in self.recovered.parts_us.items() if part != "redo"}
        return {
            "worker": ",".join(self.recovered.workers),
            "joins": self.recovered.joins,
            "step": self.recovered.iteration + 1,
            "predicted_us": {"total": self.predicted_us, **self.predicted_parts_us},
            "measured_us": {"total": self.measured_us, **measured},
            "ratio": _ratio(self.measured_us, self.predicted_us),
        }


@dataclass(frozen=True, slots=True)
class RunComparison:
    """A whole run, predicted and measured. `redo_us` is discarded work outside of the steps, the same on both sides."""

    epochs: tuple[EpochComparison, ...]
    pauses: tuple[PauseComparison, ...]
    redo_us: int = 0

    @property
    def training_us(self) -> tuple[int, int]:
        """All steps: predicted, and measured."""
        return sum(one.predicted.total_us for one in self.epochs), sum(one.measured.total_us for one in self.epochs)

    @property
    def pauses_us(self) -> tuple[int, int]:
        """All pauses: predicted, and measured."""
        return sum(one.predicted_us for one in self.pauses), sum(one.measured_us for one in self.pauses)

    @property
    def total_us(self) -> tuple[int, int]:
        """The run from its first op to its last step: predicted, and measured."""
        predicted, measured = (sum(pair) + self.redo_us for pair in zip(self.training_us, self.pauses_us, strict=True))
        return predicted, measured

    @property
    def measured_parts_us(self) -> dict[str, int]:
        """The median of each part of the recoveries from failures; empty if there was none."""
        failures = [one.recovered.parts_us for one in self.pauses if not one.recovered.joins]
        parts = ("detect", "abort", "plan", "regroup")
        return {part: round(median(times[part] for times in failures)) for part in parts} if failures else {}

    def to_json(self) -> dict[str, Any]:
        """Return the form that scripts rely on: times in µs, ratios of measured to predicted times."""
        return {
            "epochs": [one.to_json() for one in self.epochs],
            "recoveries": [one.to_json() for one in self.pauses],
            "training_us": _pair(self.training_us),
            "pauses_us": _pair(self.pauses_us),
            "redo_us": self.redo_us,
            "total_us": _pair(self.total_us),
            "measured_constants_us": self.measured_parts_us,
        }

    def lines(self) -> list[str]:
        """Return tables of the epochs, of the recoveries and of the totals."""
        texts = [*_cut([_EPOCH_HEAD, *map(_epoch_row, self.epochs)]), *self._notes()]
        if self.pauses:
            texts += ["", *_cut([_PAUSE_HEAD, *map(_pause_row, self.pauses)]), *self._constant_lines()]
        texts += ["", *self._total_lines()]
        return [f"{'' if number else 'simulation':<{_MARGIN}}{text}".rstrip() for number, text in enumerate(texts)]

    def _notes(self) -> list[str]:
        others = [_steps(one) for one in self.epochs if not one.is_planned][:_MOST_ROWS]
        return [
            "op times and their variation are those of these steps, by stage and kind: where there are fewer cores than workers,",
            "workers slow each other down, which no profile knows; the first step has an empty pipeline, and warms up",
            *(f"steps {steps}: not a plan that the planner makes on the spot; it is simulated as recorded" for steps in others),
        ]

    def _constant_lines(self) -> list[str]:
        if not self.measured_parts_us:
            return []
        flags = " ".join(f"--set recycle.{part}={time_us / 1000:g}ms" for part, time_us in self.measured_parts_us.items())
        return ["simulated pauses are assumptions; this run's pauses, for here and for 'recycle simulate', are", f"  {flags}"]

    def _total_lines(self) -> list[str]:
        rows = [("steps", self.training_us), ("pauses", self.pauses_us)]
        rows += [("repeated", (self.redo_us, self.redo_us))] if self.redo_us else []
        body = [[name, *_times(*pair, format_ms)] for name, pair in (*rows, ("total", self.total_us))]
        return aligned([["", "simulated", "measured", "ratio"], *body]).splitlines()


def _epoch_row(one: EpochComparison) -> list[str]:
    names = ", ".join(map(str, one.dead)) if len(one.dead) <= _MOST_NAMED else f"{len(one.dead)} workers"
    predicted_us, measured_us = one.predicted.iteration_us, one.measured.iteration_us
    is_there = predicted_us is not None and measured_us is not None
    later = _times(predicted_us or 0, measured_us or 0, format_us) if is_there else ["-", "-", "-"]
    return [_steps(one), names or "nobody", *later, *_times(one.predicted.first_us, one.measured.first_us, format_us)]


def _pause_row(one: PauseComparison) -> list[str]:
    step = str(one.recovered.iteration + 1)
    return [who(one.recovered), step, *_times(one.predicted_us, one.measured_us, format_ms)]


def _cut(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of the head and the first rows."""
    num_left = len(rows) - 1 - _MOST_ROWS
    return aligned(rows[: _MOST_ROWS + 1]).splitlines() + ([f"and {num_left:,} more; --json lists all"] if num_left > 0 else [])


def _times(predicted_us: int, measured_us: int, show: Callable[[int], str]) -> list[str]:
    ratio = _ratio(measured_us, predicted_us)
    return [show(predicted_us), show(measured_us), "-" if ratio is None else f"{ratio:.3f}"]


def _steps(one: EpochComparison) -> str:
    return f"{one.first_step}-{one.last_step}" if one.num_steps > 1 else str(one.first_step)


def _pair(times_us: tuple[int, int]) -> dict[str, Any]:
    predicted, measured = times_us
    return {"predicted": predicted, "measured": measured, "ratio": _ratio(measured, predicted)}


def _ratio(measured_us: int, predicted_us: int) -> float | None:
    """None if the predicted time is 0, by the constants."""
    return round(measured_us / predicted_us, 6) if predicted_us else None
