"""The record of a run in memory: ops as columns, because there may be a million of them, and all other events by type."""

from array import array
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from recycle.core.cluster import Shape, Worker
from recycle.core.errors import UserError
from recycle.core.events.op_columns import OPTIMIZER, REDUCE
from recycle.core.events.record import (
    Changed,
    Evaluated,
    Event,
    Held,
    LinkChanged,
    OpRan,
    Placed,
    Recovered,
    Saved,
    SpeedChanged,
    Spell,
    Started,
    Stepped,
    Warned,
)
from recycle.core.op import Op
from recycle.report.record.hindsight import in_hindsight
from recycle.report.record.metrics import Metrics, measure

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Ops:
    """Every executed op, reduction and step, in columns; `worker` and `what` are indices into `workers` and `texts`."""

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

    @property
    def kinds(self) -> NDArray[np.str_]:
        """The kind of each op; empty for reductions and steps."""
        kinds = ["" if text in (REDUCE, OPTIMIZER) else Op.parse(text).kind.value for text in self.texts]
        return np.array(kinds or [""])[self.what]

    @property
    def stages(self) -> Ints:
        """The stage of each worker of `workers`."""
        return np.array([Worker.parse(name).stage for name in self.workers], dtype=np.int64)

    def look_up(self, values: Mapping[tuple[str, str], int]) -> Ints:
        """The value of each op by its worker and text; -1 if `values` does not have it."""
        pairs, index = np.unique(self.worker * len(self.texts) + self.what, return_inverse=True)
        names = ((self.workers[pair // len(self.texts)], self.texts[pair % len(self.texts)]) for pair in pairs.tolist())
        return np.array([values.get(name, -1) for name in names], dtype=np.int64)[index]

    def events(self, iterations: Collection[int], workers: Collection[Worker] | None = None) -> list[OpRan]:
        """Return the events of these iterations, of these workers or of all, in order of time."""
        chosen = np.isin(self.iteration, list(iterations))
        if workers is not None:
            names = set(map(str, workers))
            chosen &= np.array([name in names for name in self.workers])[self.worker]
        indices = np.flatnonzero(chosen)
        indices = indices[np.argsort(self.start_us[indices], kind="stable")]
        columns = (self.iteration, self.worker, self.what, self.start_us, self.end_us, self.in_vain)
        rows = zip(*(column[indices].tolist() for column in columns), strict=True)
        return [OpRan(iteration, self.workers[worker], self.texts[what], *rest) for iteration, worker, what, *rest in rows]

    def chosen(self, mask: Bools) -> "Ops":
        """Return the ops for which the mask is true."""
        workers, worker = np.unique(self.worker[mask], return_inverse=True)
        texts, what = np.unique(self.what[mask], return_inverse=True)
        names = tuple(self.workers[index] for index in workers), tuple(self.texts[index] for index in texts)
        times = self.start_us[mask], self.end_us[mask]
        return Ops(*names, self.iteration[mask], worker, what, *times, self.in_vain[mask])


@dataclass(frozen=True, slots=True, eq=False)
class RunRecord:
    """The content of a record, with the peak memory of each worker and the last step of each iteration.

    `discarded` marks the ops that a recovery discarded; they are in vain too. Spells are corrected at the end of the record:
    samples of steps that were repeated from a checkpoint count once.
    """

    source: str
    name: str
    ops: Ops
    discarded: Bools
    steps: tuple[Stepped, ...]
    spells: tuple[Spell, ...]
    changes: tuple[Changed, ...]
    placed: tuple[Placed, ...]
    recoveries: tuple[Recovered, ...]
    held: tuple[Held, ...]
    saved: tuple[Saved, ...]
    warned: tuple[Warned, ...]
    speeds: tuple[SpeedChanged, ...] = ()
    links: tuple[LinkChanged, ...] = ()
    evaluations: tuple[Evaluated, ...] = ()

    @property
    def train_spells(self) -> list[Spell]:
        """The spell of each iteration, without spells of no length."""
        return [spell for spell in self.spells if spell.state == "train" and spell.length_us > 0]

    @property
    def metrics(self) -> Metrics | None:
        """The metrics of the whole run; None if the record has no spells."""
        return measure([*self.spells, *self.changes]) if any(spell.length_us for spell in self.spells) else None


class _Reader:
    """Collects events one by one; ops are stored as columns."""

    def __init__(self) -> None:
        self._begin_ops()
        self.others: dict[type[Event], list[Any]] = {}
        self.history: list[Stepped | Recovered] = []

    def add(self, event: Event) -> None:
        if not isinstance(event, OpRan):
            if isinstance(event, Started):
                self._begin_ops()  # the run was resumed by another plan, with which its later ops are compared
            self.others.setdefault(type(event), []).append(event)
            if isinstance(event, Stepped | Recovered):
                self.history.append(event)
            return
        try:
            worker = self.workers.setdefault(event.worker, len(self.workers))
            what = self.texts.setdefault(event.op, len(self.texts))
            values = (event.iteration, worker, what, event.start_us, event.end_us, bool(event.is_in_vain))
            for column, value in zip(self.columns, values, strict=True):
                column.append(value)
        except OverflowError:
            raise UserError(
                f"the record is corrupt: {event.worker} ran an op of iteration {event.iteration} at no possible time"
            ) from None

    def _begin_ops(self) -> None:
        self.workers: dict[str, int] = {}
        self.texts: dict[str, int] = {}
        self.columns = tuple(array("q") for _ in range(6))

    def ops(self) -> Ops:
        iteration, worker, what, start_us, end_us, in_vain = (np.array(column, dtype=np.int64) for column in self.columns)
        made = Ops(tuple(self.workers), tuple(self.texts), iteration, worker, what, start_us, end_us, in_vain > 0)
        if (backwards := np.flatnonzero(made.end_us < made.start_us)).size:
            index = backwards[0]
            name, text = made.workers[worker[index]], made.texts[what[index]]
            raise UserError(f"the record is corrupt: {name} ended {text} of iteration {iteration[index]} before it started it")
        return made


def read_run_record(events: Iterable[Event]) -> RunRecord:
    """Read the events of a record, in one pass."""
    reader = _Reader()
    for event in events:
        reader.add(event)
    known = reader.others
    started = known.get(Started, [Started("run", "")])[0]
    steps = {step.iteration: step for step in known.get(Stepped, [])}
    held: dict[str, Held] = {}
    for one in known.get(Held, []):
        sizes = zip(structs.astuple(held.get(one.worker, one))[1:], structs.astuple(one)[1:], strict=True)
        held[one.worker] = Held(one.worker, *map(max, sizes))
    ops, recoveries = reader.ops(), tuple(known.get(Recovered, []))
    discarded = _discarded(ops, recoveries)
    return RunRecord(
        source=started.source,
        name=started.name,
        ops=replace(ops, in_vain=ops.in_vain | discarded),
        discarded=discarded,
        steps=tuple(steps[iteration] for iteration in sorted(steps)),
        spells=tuple(in_hindsight(known.get(Spell, []), reader.history)),
        changes=tuple(known.get(Changed, [])),
        placed=tuple(known.get(Placed, [])),
        recoveries=recoveries,
        held=tuple(sorted(held.values(), key=lambda one: Worker.parse(one.worker))),
        saved=tuple(known.get(Saved, [])),
        warned=tuple(known.get(Warned, [])),
        speeds=tuple(known.get(SpeedChanged, [])),
        links=tuple(known.get(LinkChanged, [])),
        evaluations=tuple({each.num_steps: each for each in known.get(Evaluated, [])}.values()),
    )


def completed_us(ops: Ops, shape: Shape) -> dict[int, int]:
    """Return the end of each complete iteration: with an F, and a B or an I and a W, of every micro-batch at every stage."""
    numbers, position = np.unique(ops.iteration, return_inverse=True)
    num = {kind: np.bincount(position[ops.kinds == kind], minlength=len(numbers)) for kind in "FBIW"}
    num_all = shape.num_stages * shape.num_chains
    is_complete = (num["F"] == num_all) & (num["B"] + num["W"] == num_all) & (num["I"] == num["W"])
    ends = np.zeros(len(numbers), dtype=np.int64)
    np.maximum.at(ends, position, ops.end_us)
    return dict(zip(numbers[is_complete].tolist(), ends[is_complete].tolist(), strict=True))


def _discarded(ops: Ops, recoveries: Iterable[Recovered]) -> Bools:
    """Which ops belong to an iteration that a later epoch repeated: they started before the end of the abort."""
    discarded = np.zeros(len(ops), dtype=np.bool_)
    for one in recoveries:
        discarded |= (ops.iteration >= one.iteration) & (ops.start_us < one.at_us + one.detect_us + one.abort_us)
    return discarded
