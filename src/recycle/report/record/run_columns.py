"""The record of a run, read once: ops into columns, because there may be a million of them, and all other events by kind."""

from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, get_origin

import numpy as np
from numpy.typing import NDArray

from recycle.core.cluster import Shape, Worker
from recycle.core.errors import UserError
from recycle.core.events.record import (
    OPTIMIZER,
    REDUCE,
    Changed,
    Event,
    Held,
    OpRan,
    Recovered,
    Saved,
    Spell,
    Started,
    Stepped,
    Warned,
    in_hindsight,
)
from recycle.core.op import Op
from recycle.report.record.metrics import Metrics, measure

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Ops:
    """Every op, reduction and step that ran, in columns; `worker` and `what` are places in the two tuples of texts."""

    workers: tuple[str, ...]
    texts: tuple[str, ...]
    iteration: Ints
    worker: Ints
    what: Ints
    start_us: Ints
    end_us: Ints
    in_vain: Bools

    def __len__(self) -> int:
        return len(self.iteration)

    def events(self, iterations: Collection[int], workers: Collection[Worker] | None = None) -> list[OpRan]:
        """Return what ran in these iterations, in order of time: on these workers, or on all."""
        chosen = np.isin(self.iteration, list(iterations))
        if workers is not None:
            names = set(map(str, workers))
            chosen &= np.array([name in names for name in self.workers])[self.worker]
        places = np.flatnonzero(chosen)
        places = places[np.argsort(self.start_us[places], kind="stable")]
        columns = (self.iteration, self.worker, self.what, self.start_us, self.end_us, self.in_vain)
        return [
            OpRan(iteration, self.workers[worker], self.texts[what], start, end, in_vain)
            for iteration, worker, what, start, end, in_vain in zip(*(column[places].tolist() for column in columns), strict=True)
        ]

    def chosen(self, mask: Bools) -> "Ops":
        """Return those for which the mask is true, and of the texts only theirs."""
        workers, worker = np.unique(self.worker[mask], return_inverse=True)
        texts, what = np.unique(self.what[mask], return_inverse=True)
        return Ops(
            workers=tuple(self.workers[place] for place in workers),
            texts=tuple(self.texts[place] for place in texts),
            iteration=self.iteration[mask],
            worker=worker,
            what=what,
            start_us=self.start_us[mask],
            end_us=self.end_us[mask],
            in_vain=self.in_vain[mask],
        )


@dataclass(frozen=True, slots=True, eq=False)
class RunRecord:
    """What a record holds. Of each worker's memory it keeps the most; of each iteration's steps the last.

    `thrown_away` says of each op whether a recovery threw it away: such ops are in vain too. Spells are as they are known in
    hindsight: samples of steps that were done again after all went back to a checkpoint are counted once.
    """

    source: str
    name: str
    ops: Ops
    thrown_away: Bools
    steps: tuple[Stepped, ...]
    spells: tuple[Spell, ...]
    changes: tuple[Changed, ...]
    recoveries: tuple[Recovered, ...]
    held: tuple[Held, ...]
    saved: tuple[Saved, ...]
    warned: tuple[Warned, ...]

    @property
    def train_spells(self) -> list[Spell]:
        """One for each iteration; those of no length, which no clock could tell apart, are left out."""
        return [spell for spell in self.spells if spell.state == "train" and spell.length_us > 0]

    @property
    def metrics(self) -> Metrics | None:
        """Where the time of the whole run went, if the record says."""
        return measure([*self.spells, *self.changes]) if any(spell.length_us for spell in self.spells) else None


class _Reader:
    """Takes in events one by one; ops become columns at once."""

    def __init__(self) -> None:
        self.workers: dict[str, int] = {}
        self.texts: dict[str, int] = {}
        self.columns = tuple(array("q") for _ in range(5))
        self.in_vain = bytearray()
        self.others: dict[type[Event], list[Any]] = {}
        self.course: list[Stepped | Recovered] = []

    def take(self, event: Event) -> None:
        if not isinstance(event, OpRan):
            _refuse_unsound(event)
            if isinstance(event, Started):
                self._forget_ops()  # a run that went on by another plan: its ops are held against that one
            self.others.setdefault(type(event), []).append(event)
            if isinstance(event, Stepped | Recovered):
                self.course.append(event)
            return
        try:
            worker = self.workers.setdefault(event.worker, len(self.workers))
            what = self.texts.setdefault(event.op, len(self.texts))
            for column, value in zip(self.columns, (event.iteration, worker, what, event.start_us, event.end_us), strict=True):
                column.append(value)
        except (TypeError, OverflowError):
            _refuse_unsound(event)
            raise
        self.in_vain.append(bool(event.is_in_vain))

    def _forget_ops(self) -> None:
        self.workers.clear()
        self.texts.clear()
        self.in_vain.clear()
        for column in self.columns:
            del column[:]

    def ops(self) -> Ops:
        iteration, worker, what, start_us, end_us = (np.array(column, dtype=np.int64) for column in self.columns)
        in_vain = np.array(self.in_vain, dtype=np.bool_)
        made = Ops(tuple(self.workers), tuple(self.texts), iteration, worker, what, start_us, end_us, in_vain)
        if (backwards := np.flatnonzero(made.end_us < made.start_us)).size:
            place = backwards[0]
            name, text = made.workers[worker[place]], made.texts[what[place]]
            raise UserError(f"the record is corrupt: {name} ended {text} of iteration {iteration[place]} before it started it")
        return made


def _refuse_unsound(event: Event) -> None:
    """Raise if a value is not of its kind: a record is a text file, and anybody may have written into it."""
    for field in fields(event):
        value = getattr(event, field.name)
        if not _is_sound(value, field.type):
            raise UserError(f"the record is corrupt: the {field.name} of an event {event.EVENT!r} is {value!r}")


def _is_sound(value: object, kind: Any) -> bool:
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(isinstance(text, str) for text in value)
    known = int | float | None if kind == float | None else kind
    return isinstance(value, known) and not (isinstance(value, int) and abs(value) >= 2**62)


def read_run_record(events: Iterable[Event]) -> RunRecord:
    """Read the events of a record, in one pass."""
    reader = _Reader()
    for event in events:
        reader.take(event)
    known = reader.others
    started = known.get(Started, [Started("run", "")])[0]
    steps = {step.iteration: step for step in known.get(Stepped, [])}
    held: dict[str, Held] = {}
    for one in known.get(Held, []):
        held[one.worker] = _most(held.get(one.worker, one), one)
    ops, recoveries = reader.ops(), tuple(known.get(Recovered, []))
    thrown_away = _thrown_away(ops, recoveries)
    return RunRecord(
        source=started.source,
        name=started.name,
        ops=replace(ops, in_vain=ops.in_vain | thrown_away),
        thrown_away=thrown_away,
        steps=tuple(steps[iteration] for iteration in sorted(steps)),
        spells=tuple(in_hindsight(known.get(Spell, []), reader.course)),
        changes=tuple(known.get(Changed, [])),
        recoveries=recoveries,
        held=tuple(sorted(held.values(), key=lambda one: Worker.parse(one.worker))),
        saved=tuple(known.get(Saved, [])),
        warned=tuple(known.get(Warned, [])),
    )


def completed_us(ops: Ops, shape: Shape) -> dict[int, int]:
    """Return the end of each complete iteration: with an F, and a B or an I and a W, of every micro-batch at every stage."""
    numbers, position = np.unique(ops.iteration, return_inverse=True)
    kinds = np.array(["" if text in (REDUCE, OPTIMIZER) else Op.parse(text).kind.value for text in ops.texts] or [""])[ops.what]
    num = {kind: np.bincount(position[kinds == kind], minlength=len(numbers)) for kind in "FBIW"}
    num_all = shape.num_stages * shape.num_chains
    is_complete = (num["F"] == num_all) & (num["B"] + num["W"] == num_all) & (num["I"] == num["W"])
    ends = np.zeros(len(numbers), dtype=np.int64)
    np.maximum.at(ends, position, ops.end_us)
    return dict(zip(numbers[is_complete].tolist(), ends[is_complete].tolist(), strict=True))


def _thrown_away(ops: Ops, recoveries: Iterable[Recovered]) -> Bools:
    """Say which ops were of an iteration that a later epoch began again: they began before everybody had stopped."""
    lost = np.zeros(len(ops), dtype=np.bool_)
    for one in recoveries:
        lost |= (ops.iteration >= one.iteration) & (ops.start_us < one.at_us + one.detect_us + one.abort_us)
    return lost


def _most(one: Held, other: Held) -> Held:
    return replace(
        one,
        peak_bytes=max(one.peak_bytes, other.peak_bytes),
        activation_bytes=max(one.activation_bytes, other.activation_bytes),
        planned_bytes=max(one.planned_bytes, other.planned_bytes),
    )
