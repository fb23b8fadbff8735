"""A run beside a simulation of it: the epochs of a record as they went, and the tables that hold them against a prediction.

An epoch is made of steps that went by one plan. Its first step begins with an empty pipeline, so it is told by itself. Steps that
were done again from a checkpoint were done in two epochs, and count in both; ops that were in vain count nowhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np

from recycle.core.cluster import Shape, Worker
from recycle.core.events.record import OPTIMIZER, REDUCE, ROLLED_BACK, Recovered
from recycle.core.op import Op
from recycle.core.units import format_us
from recycle.report.record.recoveries import format_ms, who
from recycle.report.record.run_columns import Bools, Ints, Ops, RunRecord
from recycle.report.record.tables import aligned

_MOST_NAMED = 4
_MOST_ROWS = 24
_MARGIN = 11


@dataclass(frozen=True, eq=False)
class Epoch:
    """Steps in a row by one plan, from `begin_us` on; `recovered` says how they came to it, None where the run was started.

    `iterations` were applied, and ended at `ends_us`. `ops` are those of the iterations of which the record holds every op, which
    may be fewer: a worker that dies has not told of its last ones.
    """

    recovered: Recovered | None
    begin_us: int
    iterations: tuple[int, ...]
    ends_us: tuple[int, ...]
    ops: Ops

    @property
    def times_us(self) -> list[int]:
        """What each step took, since the one before it."""
        return np.diff(self.ends_us, prepend=self.begin_us).tolist()

    @cached_property
    def whole(self) -> Ints:
        """The iterations of which every op is known."""
        return np.unique(self.ops.iteration)

    @cached_property
    def rows(self) -> dict[Worker, list[Op]]:
        """Who ran what in an iteration, in order of time; nobody else was there."""
        rows: dict[Worker, list[Op]] = {Worker.parse(name): [] for name in self.ops.workers}
        for event in self.ops.events([int(self.whole[0])]):
            if event.op not in (REDUCE, OPTIMIZER):
                rows[Worker.parse(event.worker)].append(Op.parse(event.op))
        return rows

    def dead(self, shape: Shape) -> frozenset[Worker]:
        """Whose seats nobody sat on."""
        return frozenset(worker for worker in shape.workers() if worker not in self.rows)

    def spans_us(self, rows: Mapping[Worker, Sequence[Op]]) -> tuple[Ints, Ints]:
        """When each op started and ended, by whole iteration and by its number in `rows`, one row after the other."""
        numbered = [(str(worker), str(op)) for worker, ops in rows.items() for op in ops]
        numbers = {pair: number for number, pair in enumerate(numbered)}
        ops = self.ops
        pairs, place = np.unique(ops.worker * len(ops.texts) + ops.what, return_inverse=True)
        named = ((ops.workers[pair // len(ops.texts)], ops.texts[pair % len(ops.texts)]) for pair in pairs.tolist())
        number = np.array([numbers.get(pair, -1) for pair in named])[place]
        is_op = number >= 0
        where = np.searchsorted(self.whole, ops.iteration[is_op]), number[is_op]
        starts, ends = (np.zeros((len(self.whole), len(numbers)), dtype=np.int64) for _ in range(2))
        starts[where], ends[where] = ops.start_us[is_op], ops.end_us[is_op]
        return starts, ends

    def reduced_us(self, num_stages: int) -> Ints:
        """What reductions took, by whole iteration and stage: they begin when the last worker has come to it."""
        chosen, where = self._after_ops(REDUCE)
        came, ended = (np.zeros((len(self.whole), num_stages), dtype=np.int64) for _ in range(2))
        np.maximum.at(came, where, self.ops.start_us[chosen])
        np.maximum.at(ended, where, self.ops.end_us[chosen])
        return ended - came

    def stepped_us(self, num_stages: int) -> Ints:
        """What optimizer steps took, by whole iteration and stage, in the mean over its workers."""
        chosen, where = self._after_ops(OPTIMIZER)
        sums, counts = (np.zeros((len(self.whole), num_stages), dtype=np.int64) for _ in range(2))
        np.add.at(sums, where, (self.ops.end_us - self.ops.start_us)[chosen])
        np.add.at(counts, where, 1)
        return sums // np.maximum(1, counts)

    def _after_ops(self, what: str) -> tuple[Bools, tuple[Ints, Ints]]:
        """Which events are of this kind, and of which whole iteration and stage they are."""
        ops = self.ops
        chosen: Bools = np.array([text == what for text in ops.texts])[ops.what]
        stages = np.array([Worker.parse(name).stage for name in ops.workers])
        return chosen, (np.searchsorted(self.whole, ops.iteration[chosen]), stages[ops.worker[chosen]])


@dataclass(frozen=True, slots=True)
class _Border:
    """Ops that start at `from_us` or later are of the next epoch, which trains from `begin_us` on."""

    from_us: int
    begin_us: int
    recovered: Recovered | None = None


def split_epochs(run: RunRecord, shape: Shape) -> list[Epoch]:
    """Return the epochs of a run that have a whole iteration, in order of time."""
    if len(run.ops) == 0:
        return []
    borders = _borders(run)
    firsts_us = [border.from_us for border in borders]
    number = np.searchsorted(firsts_us, run.ops.start_us, side="right") - 1
    counts = ~run.ops.in_vain | run.thrown_away  # what was thrown away with a whole iteration had counted until then
    epochs = []
    for place, (border, last_us) in enumerate(zip(borders, [*firsts_us[1:], None], strict=True)):
        ops = run.ops.chosen(counts & (number == place))
        if ends := whole_ends_us(ops, shape):
            kept = ops.chosen(np.isin(ops.iteration, list(ends)))
            ends |= {one.iteration: one.at_us for one in run.steps if border.from_us < one.at_us <= (last_us or one.at_us)}
            iterations = tuple(sorted(ends))
            epochs.append(Epoch(border.recovered, border.begin_us, iterations, tuple(ends[one] for one in iterations), kept))
    return epochs


def late_recoveries(run: RunRecord) -> list[Recovered]:
    """The recoveries that came after the first op that the record still holds."""
    return [border.recovered for border in _borders(run) if border.recovered is not None]


def in_flight_us(run: RunRecord) -> int:
    """The time that recoveries threw away since the last step before them: steps that are done again count in their epochs."""
    ends_us = {one.at_us for one in late_recoveries(run)}
    spells = (spell for spell in run.spells if spell.state == "redo" and spell.cause != ROLLED_BACK)
    return sum(spell.length_us for spell in spells if spell.end_us in ends_us)


def _borders(run: RunRecord) -> list[_Border]:
    """Where epochs begin: with the first op, and where the run was started again or recovered."""
    first_us = int(run.ops.start_us.min())
    starts = [_Border(spell.end_us, spell.end_us) for spell in run.spells if spell.cause == "start"]
    # From the moment when all had stopped: the new epoch's first op may begin before anybody has heard of it.
    recoveries = [_Border(one.at_us + one.detect_us + one.abort_us, one.end_us, one) for one in run.recoveries]
    later = sorted((border for border in starts + recoveries if border.from_us > first_us), key=lambda border: border.from_us)
    return [_Border(first_us, first_us), *later]


def whole_ends_us(ops: Ops, shape: Shape) -> dict[int, int]:
    """When each iteration ended that has an F, and a B or an I and a W, of every micro-batch at every stage."""
    numbers, place = np.unique(ops.iteration, return_inverse=True)
    kinds = np.array(["" if text in (REDUCE, OPTIMIZER) else Op.parse(text).kind.value for text in ops.texts] or [""])[ops.what]
    num = {kind: np.bincount(place[kinds == kind], minlength=len(numbers)) for kind in "FBIW"}
    all_of_them = shape.num_stages * shape.num_chains
    is_whole = (num["F"] == all_of_them) & (num["B"] + num["W"] == all_of_them) & (num["I"] == num["W"])
    ends = np.zeros(len(numbers), dtype=np.int64)
    np.maximum.at(ends, place, ops.end_us)
    return dict(zip(numbers[is_whole].tolist(), ends[is_whole].tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class EpochPace:
    """What steps in a row take: the first, in which the pipeline fills, the median of those after it, and all of them."""

    first_us: int
    iteration_us: int | None  # None where there is no other step than the first
    total_us: int

    @staticmethod
    def of(times_us: Sequence[int]) -> "EpochPace":
        later = times_us[1:]
        return EpochPace(times_us[0], round(median(later)) if later else None, sum(times_us))

    def to_json(self) -> dict[str, Any]:
        return {"first": self.first_us, "iteration": self.iteration_us, "total": self.total_us}


@dataclass(frozen=True, slots=True)
class Stretch:
    """The steps of an epoch, predicted and measured; `is_planned` says that the planner makes the plan that was played."""

    first_step: int
    last_step: int
    dead: tuple[Worker, ...]
    is_planned: bool
    predicted: EpochPace
    measured: EpochPace

    @property
    def num_steps(self) -> int:
        return self.last_step - self.first_step + 1

    @property
    def ratio(self) -> float | None:
        """The measured iteration over the predicted one; of the first where there is no other."""
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
class RecoveryPause:
    """A recovery, and what was predicted of it by part. What is done again is no part: it is as long as the failure came late."""

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
class Comparison:
    """A whole run, predicted and measured. What was done again counts on both sides as it was, for it is no speed of anything.

    `redo_us` is what of it lies in no step of a stretch.
    """

    stretches: tuple[Stretch, ...]
    pauses: tuple[RecoveryPause, ...]
    redo_us: int = 0

    @property
    def training_us(self) -> tuple[int, int]:
        """All steps: predicted, and measured."""
        return sum(one.predicted.total_us for one in self.stretches), sum(one.measured.total_us for one in self.stretches)

    @property
    def pauses_us(self) -> tuple[int, int]:
        """All pauses: predicted, and measured."""
        return sum(one.predicted_us for one in self.pauses), sum(one.measured_us for one in self.pauses)

    @property
    def total_us(self) -> tuple[int, int]:
        """The run from its first op to its last step: predicted, and measured."""
        trained, paused = self.training_us, self.pauses_us
        return trained[0] + paused[0] + self.redo_us, trained[1] + paused[1] + self.redo_us

    @property
    def measured_parts_us(self) -> dict[str, int]:
        """What the parts of a recovery from a failure took in the median; empty where nobody left."""
        failures = [one.recovered.parts_us for one in self.pauses if not one.recovered.joins]
        parts = ("detect", "abort", "plan", "regroup")
        return {part: round(median(times[part] for times in failures)) for part in parts} if failures else {}

    def to_json(self) -> dict[str, Any]:
        """What scripts rely on; times in µs, and each ratio is the measured over the predicted."""
        return {
            "epochs": [one.to_json() for one in self.stretches],
            "recoveries": [one.to_json() for one in self.pauses],
            "training_us": _pair(self.training_us),
            "pauses_us": _pair(self.pauses_us),
            "redo_us": self.redo_us,
            "total_us": _pair(self.total_us),
            "measured_constants_us": self.measured_parts_us,
        }

    def lines(self) -> list[str]:
        """The same for people: a table of epochs, one of recoveries, and what all of it comes to."""
        texts = [*_stretch_lines(self.stretches), *self._notes()]
        if self.pauses:
            texts += ["", *_pause_lines(self.pauses), *self._constant_lines()]
        texts += ["", *self._total_lines()]
        return [f"{'' if number else 'simulation':<{_MARGIN}}{text}".rstrip() for number, text in enumerate(texts)]

    def _notes(self) -> list[str]:
        others = [_steps(one) for one in self.stretches if not one.is_planned][:_MOST_ROWS]
        return [
            "ops take as long and vary as much as they did in these steps, by stage and kind: where there are fewer cores than",
            "workers they slow each other down, which no profile knows; the first step has an empty pipeline, and warms up",
            *(f"steps {steps}: not a plan that the planner makes on the spot; it is played as recorded" for steps in others),
        ]

    def _constant_lines(self) -> list[str]:
        if not self.measured_parts_us:
            return []
        told = " ".join(f"--set recycle.{part}={time_us / 1000:g}ms" for part, time_us in self.measured_parts_us.items())
        return ["simulated pauses are assumptions; here and in 'recycle simulate', this run's would be", f"  {told}"]

    def _total_lines(self) -> list[str]:
        rows = [("steps", self.training_us), ("pauses", self.pauses_us)]
        rows += [("done again", (self.redo_us, self.redo_us))] if self.redo_us else []
        body = [[name, *_times(*pair, format_ms)] for name, pair in (*rows, ("in all", self.total_us))]
        return aligned([["", "simulated", "measured", "ratio"], *body]).splitlines()


def _stretch_lines(stretches: Sequence[Stretch]) -> list[str]:
    head = ["steps", "dead", "iteration simulated", "measured", "ratio", "first step simulated", "measured", "ratio"]
    return _cut([head, *map(_stretch_row, stretches)])


def _stretch_row(one: Stretch) -> list[str]:
    names = ", ".join(map(str, one.dead)) if len(one.dead) <= _MOST_NAMED else f"{len(one.dead)} workers"
    predicted_us, measured_us = one.predicted.iteration_us, one.measured.iteration_us
    is_there = predicted_us is not None and measured_us is not None
    later = _times(predicted_us or 0, measured_us or 0, format_us) if is_there else ["-", "-", "-"]
    return [_steps(one), names or "nobody", *later, *_times(one.predicted.first_us, one.measured.first_us, format_us)]


def _pause_lines(pauses: Sequence[RecoveryPause]) -> list[str]:
    rows = [
        [who(one.recovered), str(one.recovered.iteration + 1), *_times(one.predicted_us, one.measured_us, format_ms)]
        for one in pauses
    ]
    return _cut([["pause", "step", "simulated", "measured", "ratio"], *rows])


def _cut(rows: Sequence[Sequence[str]]) -> list[str]:
    """The head and the first rows below it in lines."""
    num_left = len(rows) - 1 - _MOST_ROWS
    return aligned(rows[: _MOST_ROWS + 1]).splitlines() + ([f"and {num_left:,} more; --json lists all"] if num_left > 0 else [])


def _times(predicted_us: int, measured_us: int, show: Callable[[int], str]) -> list[str]:
    ratio = _ratio(measured_us, predicted_us)
    return [show(predicted_us), show(measured_us), "-" if ratio is None else f"{ratio:.3f}"]


def _steps(one: Stretch) -> str:
    return f"{one.first_step}-{one.last_step}" if one.num_steps > 1 else str(one.first_step)


def _pair(times_us: tuple[int, int]) -> dict[str, Any]:
    predicted, measured = times_us
    return {"predicted": predicted, "measured": measured, "ratio": _ratio(measured, predicted)}


def _ratio(measured_us: int, predicted_us: int) -> float | None:
    """None where nothing was predicted, because the constants say so."""
    return round(measured_us / predicted_us, 6) if predicted_us else None
