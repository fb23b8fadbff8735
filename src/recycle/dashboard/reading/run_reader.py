"""`RunReader`: what a page needs of a run's record, kept up to date as the record grows."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from recycle.core.cluster import Shape, Worker
from recycle.core.errors import FileProblem, UserError
from recycle.core.events.record import Changed, Event, OpRan, Recovered, Saved, Spell, Started, Stepped, Suspected, Warned
from recycle.core.events.record_file import PLAN, describe_gap, later_plans, parse_line
from recycle.core.events.step_rates import samples_per_s
from recycle.core.plans.carried_layers import carried_by_stage
from recycle.core.plans.plan import Plan
from recycle.dashboard.reading.op_ranges import OpRanges, iteration_of_ops
from recycle.dashboard.reading.record_tail import RecordTail
from recycle.dashboard.reading.served_folder import ServedFolder
from recycle.report.record.run_state import ALIVE, DEAD, JOINING, RunState, initial_state, state_after

_MOST_PROBLEMS = 20
_LONGEST_LINE_BYTES = 1 << 20
PART_BYTES = 8_000_000
_NOT_A_NUMBER = float("nan")


@dataclass(slots=True)
class RunColumns:
    """The steps and spells of a run as columns; a number that is not known is nan."""

    at_us: "array[int]" = field(default_factory=lambda: array("q"))
    loss: "array[float]" = field(default_factory=lambda: array("d"))
    spell_end_us: "array[int]" = field(default_factory=lambda: array("q"))
    spell_rate: "array[float]" = field(default_factory=lambda: array("d"))
    spell_live: "array[int]" = field(default_factory=lambda: array("q"))

    def add(self, steps: list[Stepped], spells: list[Spell]) -> None:
        """Add the values of steps and of spells."""
        self.at_us.extend([step.at_us for step in steps])
        self.loss.extend([_NOT_A_NUMBER if step.loss is None else step.loss for step in steps])
        # A value holds from the end of the spell before: of the first spell the start is added, too.
        first = spells[:1] if not self.spell_end_us else []
        self.spell_end_us.extend([*(spell.start_us for spell in first), *(spell.end_us for spell in spells)])
        self.spell_rate.extend([samples_per_s(spell) or 0.0 for spell in (*first, *spells)])
        self.spell_live.extend([spell.num_live for spell in (*first, *spells)])


class RunReader:
    """A run so far. `read` takes in what was added to its record; views are made of the attributes.

    `line_starts` has the position of every line that is not about ops, and `recovery_lines` which of them are
    recoveries. `problems` are sentences about damaged or missing lines.
    `version` grows with every line, and begins again with every `generation`.
    """

    def __init__(self, record: Path, folder: ServedFolder | None = None) -> None:
        self.record = record
        self.folder = folder or ServedFolder(record.parent)
        self._tail = RecordTail(record, self.folder)
        self._plan_time_ns = self._plan_written_ns()
        self._reset()

    def _reset(self) -> None:
        self.version, self.num_lines, self.num_missing = 0, 1, 0
        self.problem = ""
        self.problems: list[str] = []
        self._new_steps: list[Stepped] = []
        self._new_spells: list[Spell] = []
        self.started = Started("", "")
        self.columns = RunColumns()
        self.spells: list[Spell] = []
        self.changes: list[Changed] = []
        self.progress: list[Stepped | Recovered] = []
        self.recoveries: list[Recovered] = []
        self.warned: list[Warned] = []
        self.saved: list[Saved] = []
        self.suspected: dict[str, str] = {}
        self.line_starts, self.recovery_lines = array("q"), array("q")
        self.op_ranges = OpRanges()
        self.plan_problem = ""
        self.state = self._first_state()

    def _first_state(self) -> RunState:
        """The state before the first event: its places are those of the plan, if the run has one."""
        try:
            plan = self.plan_of(0)
        except UserError as problem:
            self.plan_problem = str(problem)
            return initial_state(0)
        return initial_state(0, plan.problem.shape, plan.problem.cluster.failed, carried_by_stage(plan))

    @property
    def generation(self) -> int:
        return self._tail.generation

    @property
    def shape(self) -> Shape | None:
        return self.state.shape

    @property
    def end_us(self) -> int:
        """The time of the last step, spell or recovery."""
        ends = (self.columns.at_us[-1:], self.columns.spell_end_us[-1:], [one.end_us for one in self.recoveries[-1:]])
        return max((end for part in ends for end in part), default=0)

    def read(self, most_bytes: int = 1 << 62) -> bool:
        """Take in at most about `most_bytes` that are new; return whether anything changed."""
        before = (self.generation, self.version, self.problem)
        if self._tail.begin_again_if_replaced() or self._has_late_plan():
            self._reset()
        try:
            for start, line in self._tail.read(most_bytes):
                self._take(start, line)
            self.problem = ""
        except FileProblem as problem:
            self.problem = str(problem)
        self._catch_up()
        return before != (self.generation, self.version, self.problem)

    @property
    def share_read(self) -> float:
        """How much of the record was read: a long one is read in parts."""
        try:
            size = self.record.lstat().st_size
        except OSError:
            return 1.0
        return min(1.0, self._tail.position / size) if size - self._tail.position > _LONGEST_LINE_BYTES else 1.0

    def _has_late_plan(self) -> bool:
        """Whether there is a plan now that was not there before: a run writes it after the first lines of its record."""
        if self.shape is not None or self._plan_time_ns == (now_ns := self._plan_written_ns()):
            return False
        self._plan_time_ns = now_ns
        self._tail.begin_again()
        return True

    def _plan_written_ns(self) -> int:
        try:
            return (self.record.parent / PLAN).lstat().st_mtime_ns
        except OSError:
            return 0

    def _take(self, start: int, line: bytes) -> None:
        self.version += 1
        self.num_lines += 1
        if (iteration := iteration_of_ops(line)) is not None:
            self.op_ranges.add(iteration, start, len(line))
            return
        self.line_starts.append(start)
        try:
            event, number = parse_line(line)
        except UserError as problem:
            self._note(f"line {self.num_lines}: {problem}")
            return
        if number is not None and number != self.num_lines + self.num_missing:
            self._note(describe_gap(self.num_lines + self.num_missing, number))
            self.num_missing = number - self.num_lines
        self._add(event)

    def _note(self, sentence: str) -> None:
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(sentence)

    def _add(self, event: Event) -> None:
        match event:  # nearly all lines of a long record are of the first two kinds
            case Stepped():
                self._new_steps.append(event)
                self.progress.append(event)
                return
            case Spell():
                self._new_spells.append(event)
                self.spells.append(event)
                return
        self._catch_up()
        self.state = state_after(self.state, event)
        match event:
            case Started():
                self.started = event
                if self.shape is None and (shape := _shape_of(event)) is not None:
                    self.state = _all_alive(shape)
            case Recovered():
                self.recoveries.append(event)
                self.recovery_lines.append(len(self.line_starts) - 1)
                self.progress.append(event)
            case Changed():
                self.changes.append(event)
                self.suspected.pop(event.node, None)
            case Suspected():
                self.suspected[event.node] = event.reason
            case Warned():
                self.warned.append(event)
            case Saved():
                self.saved.append(event)

    def _catch_up(self) -> None:
        """Take the last steps and spells into the columns and the state: a record may have hundreds of thousands of them.

        The state's sums over all of them are not kept: `spells` and `progress` have them.
        """
        self.columns.add(self._new_steps, self._new_spells)
        last: tuple[Event, ...] = (*self._new_spells[-1:], *self._new_steps[-2:])
        for event in last:
            self.state = state_after(self.state, event)
        self._new_spells.clear()
        self._new_steps.clear()

    @property
    def dead_places(self) -> frozenset[Worker]:
        """The places that are empty now."""
        if self.shape is None:
            return frozenset()
        return frozenset(worker for worker in self.shape.workers() if self.state.places.get(str(worker)) in (DEAD, JOINING))

    def open(self) -> BinaryIO:
        """Open the record; raises FileProblem if that is not possible."""
        try:
            return self.folder.open(self.record)
        except OSError as problem:
            raise FileProblem(f"cannot read {self.record.name}: {problem.strerror or problem}") from None

    def ops(self, iteration: int) -> Iterator[OpRan]:
        """Yield the ops of one iteration, of all attempts; raises FileProblem if the record cannot be read."""
        with self.open() as stream:
            yield from self.op_ranges.ops(stream, iteration)

    def plan_of(self, iteration: int) -> Plan:
        """The plan of an iteration; raises FileProblem if it cannot be read."""
        begun = {number: path for number, path in later_plans(self.record.parent).items() if number <= iteration}
        path = begun[max(begun)] if begun else self.record.parent / PLAN
        try:
            status = path.lstat()
        except OSError:
            raise FileProblem(f"cannot read the plan of this run: there is no {path.name}") from None
        return _load_plan(self.folder, path, (status.st_ino, status.st_mtime_ns))


def _shape_of(started: Started) -> Shape | None:
    try:
        return Shape(*started.shape) if len(started.shape) == 3 else None
    except UserError:
        return None


def _all_alive(shape: Shape) -> RunState:
    state = initial_state(0, shape)
    return replace(state, places=dict.fromkeys(state.places, ALIVE))


@lru_cache(maxsize=8)
def _load_plan(folder: ServedFolder, path: Path, version: tuple[int, int]) -> Plan:
    """The plan in a file; it is read again if the file has changed."""
    return Plan.load_text(folder.read_file(path), path)
