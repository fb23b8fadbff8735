"""The folder of a run: its plan, its record, its checkpoints, its summary; new, or one to go on with."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from recycle.core.errors import FileProblem, UserError
from recycle.core.events.record import (
    CHECKPOINTS,
    PLAN,
    RECORD,
    SUMMARY,
    Event,
    Held,
    OpRan,
    RecordWriter,
    Saved,
    Spell,
    Started,
    Stepped,
    later_plans,
    plan_file,
    read_record,
)
from recycle.core.files import refuse_unwritable, write_text
from recycle.core.plans.plan import Plan, Row
from recycle.runtime.checkpoint import Checkpoint, CheckpointFolder, latest
from recycle.runtime.checkpoint.files import find_checkpoints, is_whole
from recycle.runtime.coordinator.ledger.run_ledger import Trained
from recycle.runtime.job import CheckpointOptions


@dataclass(frozen=True, slots=True)
class RunFolderOptions:
    """Where a run is to be recorded and how often saved; under which name, with which texts beside it; anew, or going on."""

    folder: Path
    every: int = 0
    keep: int = 2
    resume: bool = False
    name: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def saving(self) -> CheckpointOptions:
        return CheckpointOptions(self.folder / CHECKPOINTS, self.every, self.keep)


class RunFolder:
    """A context in which a run is recorded. `resumed` is where it goes on; `gone_us` and `losses` are of what it has done.

    `before` is what somebody else has written of this very run, None if nobody did.
    """

    def __init__(
        self, plot: RunFolderOptions, plan: Plan, fingerprint: Mapping[str, Any], num_steps: int, is_again: bool = False
    ) -> None:
        """With `is_again`, somebody else was writing this very run, and is gone: nothing of it is lost."""
        folder, resume, name = plot.folder, plot.resume, plot.name
        refuse_unwritable(folder / SUMMARY)
        self.folder = folder
        self.saving = plot.saving
        self.resumed: Checkpoint | None = None
        self.warnings: list[str] = []
        self.gone_us = 0
        self.losses: list[float] = []
        before: list[Event] = [Started("train", name)]
        self.before: list[Event] | None = None
        if is_again:
            self.before = before = list(read_record(folder / RECORD))
            starts = [event for event in before if isinstance(event, Spell) and event.cause == "start"]
            self.gone_us = starts[-1].start_us if starts else 0  # what it had gone on from, if it had
        elif resume:
            self.resumed, self.warnings = latest(self.saving.folder, fingerprint)
            if self.resumed.num_steps > num_steps:
                raise UserError(
                    f"{folder} has done {self.resumed.num_steps} steps, more than the {num_steps} to be done: "
                    "ask for at least as many"
                )
            before = list(led_to(self.resumed.num_steps, read_record(folder / RECORD)))
            if _rows_in(folder / PLAN) != plan.rows:
                before.append(Started("train", name))  # by another plan from here on
            self.gone_us = max((event.end_us for event in before if isinstance(event, Spell)), default=0)
            self.losses = _losses(before)
        elif find_checkpoints(self.saving.folder):
            raise FileProblem(f"{folder} holds the checkpoints of another run: resume it, or name another folder")
        # First, because it makes room: what an unfinished checkpoint left is removed.
        self.checkpoints = CheckpointFolder(self.saving.folder, plan.problem.shape.num_stages, self.saving.keep, fingerprint)
        for file, text in {PLAN: plan.dumps(), **plot.files}.items():
            write_text(folder / file, text)
        self._record: RecordWriter | None = RecordWriter(folder / RECORD, before)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        if self._record is not None:
            self._record.close()

    def write(self, *events: Event) -> str | None:
        """Write events into the record; return a sentence when that fails, and write no more from then on."""
        if self._record is None:
            return None
        try:
            self._record.write(*events)
        except OSError as problem:
            self._record.close()
            self._record = None
            return f"{self.folder / RECORD} ends here, but training goes on: {problem.strerror or problem}"
        return None

    def keep_plan(self, iteration: int, text: str) -> str | None:
        """Keep the plan by which all go from `iteration` on, unless it is that of before; return a sentence if that fails.

        Plans from there on that were kept before are of epochs whose iterations are all done again.
        """
        before = self.folder / PLAN
        try:
            for number, path in later_plans(self.folder).items():
                if number < iteration:
                    before = path
                else:
                    path.unlink()
            if text != _text_of(before):
                write_text(self.folder / plan_file(iteration), text)
        except (OSError, FileProblem) as problem:
            return f"the plan from iteration {iteration} on is not kept, but training goes on: {problem}"
        return None

    def newest(self) -> int:
        """After how many steps the newest whole checkpoint was made; 0 if there is none, which is how training began."""
        return next((num_steps for num_steps, folder in find_checkpoints(self.saving.folder).items() if is_whole(folder)), 0)

    def close(self, trained: Trained) -> str | None:
        """Write what the run came to; return a sentence if that fails."""
        try:
            write_text(self.folder / SUMMARY, json.dumps(trained.to_json(), indent=1) + "\n")
        except FileProblem as problem:
            return str(problem)
        return None


def _losses(events: Iterable[Event]) -> list[float]:
    """The loss of every step; one that was done again after a checkpoint was loaded counts as it came out last."""
    found: dict[int, float] = {}
    for event in events:
        if isinstance(event, Stepped):
            found = {number: loss for number, loss in found.items() if number < event.iteration}
            found[event.iteration] = event.loss if event.loss is not None else math.nan
    return list(found.values())


def led_to(num_steps: int, events: Iterator[Event]) -> Iterator[Event]:
    """What of a record led to its first `num_steps` steps; what came after was in vain, since it is to be done again."""
    is_lost = False
    for event in events:
        match event:
            case OpRan(is_in_vain=True) if event.iteration >= num_steps:
                pass  # it says nothing of the steps before: a slow worker may tell of those later
            case OpRan(is_in_vain=False) | Stepped():
                # By the last that was told: a step that was done again after all went back to a checkpoint comes twice.
                is_lost = event.iteration >= num_steps
                if not is_lost:
                    yield event
            case Spell(state="train") if is_lost:
                yield replace(event, state="redo", samples=0, discarded=event.samples)
            case Held():
                pass  # it says what a whole run held, and that is not over
            case Saved() if event.num_steps > num_steps:
                pass
            case _:
                yield event


def _rows_in(path: Path) -> Sequence[Row]:
    """Who does what by the plan there, nobody if there is none; how long it took to find is no part of that."""
    try:
        return Plan.load(path).rows
    except UserError:
        return ()


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
