"""`RunFolder`: the plan, record, checkpoints and summary of a run on disk, of a new run or a resumed one."""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from recycle.control.decide.messages import ControlMessage, DownloadFile, UploadFile
from recycle.control.net.file_transfer import serve_transfer
from recycle.control.net.server import ConnectionTask
from recycle.core.errors import FileProblem, NoCheckpoint, UserError
from recycle.core.events.record import Evaluated, Event, Held, OpRan, OpsRan, Recovered, Resumed, Saved, Spell, Started, Stepped
from recycle.core.events.record_file import (
    CHECKPOINTS,
    CUT_OFF,
    PLAN,
    RECORD,
    SUMMARY,
    RecordWriter,
    events_after,
    later_plans,
    num_complete_bytes,
    plan_file,
    read_record,
)
from recycle.core.files import refuse_unwritable, write_text
from recycle.core.plans.plan import Plan, Row
from recycle.core.units import count_text
from recycle.runtime.checkpoint.compatibility import keep_model_names
from recycle.runtime.checkpoint.files import (
    MANIFEST,
    Checkpoint,
    find_checkpoints,
    is_to_be_read,
    is_to_be_written,
    read_checkpoint,
)
from recycle.runtime.checkpoint.folder import CheckpointFolder
from recycle.runtime.checkpoint.resume import latest
from recycle.runtime.coordinator.ledger.trained import Trained
from recycle.runtime.options import CheckpointOptions, RunFolderOptions

# A record that cannot be written for so long ends. Until then, workers keep their reports, too.
_MOST_UNWRITTEN_BYTES = 1 << 26


class RunFolder:
    """A context in which a run is recorded in its folder.

    `resumed` is the checkpoint from which the run continues, `gone_us`, `losses` and `evaluations` are those before it.
    `before` are the events that a previous coordinator has written of this very run, None if there was none; of ops only those
    after the last step.
    """

    def __init__(
        self,
        folder: Path,
        options: RunFolderOptions,
        checkpoint: CheckpointOptions,
        plan: Plan,
        fingerprint: Mapping[str, Any],
        num_steps: int,
        is_takeover: bool = False,
    ) -> None:
        """With `is_takeover`, a previous coordinator has written this very run and died: its events are kept."""
        refuse_unwritable(folder / SUMMARY)
        self.folder = folder
        self.checkpoint_folder = folder / CHECKPOINTS
        self.resumed: Checkpoint | None = None
        self.warnings: list[str] = []
        self.gone_us = 0
        self.losses: list[float] = []
        self.evaluations: list[Event] = []
        first = Started("train", options.name)
        before: Iterable[Event] = [first]
        self.before: Iterator[Event] | None = None
        if is_takeover:
            num_bytes = _cut_unfinished(folder / RECORD)
            self.before = read_record(folder / RECORD, num_bytes, is_packed=True)
            earlier = read_record(folder / RECORD, num_bytes, is_packed=True)
            self.gone_us = max((event.at_us for event in earlier if isinstance(event, Resumed)), default=0)
        elif checkpoint.resume:
            self.resumed, self.warnings = latest(self.checkpoint_folder, fingerprint)
            if self.resumed.num_steps > num_steps:
                raise UserError(
                    f"{folder} has done {self.resumed.num_steps} steps, more than the {num_steps} to be done: "
                    "ask for at least as many"
                )
            before = self._events_to_keep(self.resumed.num_steps, first, _rows_in(folder / PLAN) != plan.rows)
        elif find_checkpoints(self.checkpoint_folder):
            raise FileProblem(f"{folder} holds the checkpoints of another run: resume it, or name another folder")
        fingerprint = keep_model_names(fingerprint, self.checkpoint_folder)
        # First, because it removes unfinished checkpoints, and so makes room.
        self.checkpoints = CheckpointFolder(
            self.checkpoint_folder, plan.problem.shape.num_stages, checkpoint.keep, fingerprint, is_takeover
        )
        self._record: RecordWriter | None = RecordWriter(folder / RECORD, None if is_takeover else before)
        if not is_takeover:  # else they are there, and the disk may be full
            for file, text in {PLAN: plan.dumps(), **options.files}.items():
                write_text(folder / file, text)

    def _events_to_keep(self, num_steps: int, first: Started, is_other_plan: bool) -> Iterator[Event]:
        """Yield what the record has of the first `num_steps` steps, and then that the run is resumed; note losses and time.

        Nothing is held in memory: a record may be long. A warning says what is missing of it, perhaps since the disk was full:
        lines are numbered anew, and later nobody sees it.
        """
        path, gaps, losses = self.folder / RECORD, list[str](), dict[int, float]()
        for event in events_before(num_steps, read_record(path, gaps=gaps, is_packed=True)) if path.exists() else [first]:
            match event:
                case Stepped():  # of a step that was run again after a checkpoint was loaded, the last one counts
                    losses[event.iteration] = event.loss if event.loss is not None else math.nan
                case Evaluated():
                    self.evaluations.append(event)
                case Spell():
                    self.gone_us = max(self.gone_us, event.end_us)
            yield event
        if is_other_plan:
            yield first
        self.losses = [losses.get(iteration, math.nan) for iteration in range(num_steps)]
        if num_missing := num_steps - len(losses):
            gaps.append(f"it has not the losses of {num_missing} of {count_text(num_steps, 'step')}")
        if told := [gap for gap in gaps if gap != CUT_OFF]:
            self.warnings.append(f"{path} is not whole: {'; '.join(told)}")
        yield Resumed(self.gone_us, num_steps)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        if self._record is not None:
            with contextlib.suppress(OSError):
                self._record.write()
            self._record.close()

    def write(self, *events: Event) -> str | None:
        """Write events into the record, or, if that fails, with a later call; return a sentence when it begins to fail.

        If too many wait, the record ends for good.
        """
        if self._record is None:
            return None
        is_first = self.is_written
        try:
            self._record.write(*events)
        except OSError as problem:
            sentence = f"cannot write {self.folder / RECORD}, but training goes on: {problem.strerror or problem}"
            if self._record.num_unwritten_bytes > _MOST_UNWRITTEN_BYTES:
                self._record.close()
                self._record = None
                return f"the record ends here: {sentence}"
            return sentence if is_first else None
        return None

    @property
    def is_written(self) -> bool:
        """Whether no event waits for room on the disk."""
        return self._record is None or not self._record.num_unwritten_bytes

    def keep_plan(self, iteration: int, text: str) -> str | None:
        """Write the plan that is in force from `iteration` on, unless it did not change; return a sentence if that fails.

        Plans of later iterations are removed: those iterations are run again.
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

    def newest(self) -> tuple[int, list[str]]:
        """The number of steps of the newest whole checkpoint, every byte checked, and a sentence for each one that is not whole.

        Without one it is 0, the start of training.
        """
        try:
            checkpoint, warnings = latest(self.checkpoint_folder, mentions_unfinished=False)
        except NoCheckpoint as problem:
            return 0, [str(problem)] if find_checkpoints(self.checkpoint_folder) else []
        return checkpoint.num_steps, warnings

    def transfer_task(self) -> ConnectionTask:
        """What a connection for a file of a checkpoint runs."""
        folder = self.checkpoint_folder
        return partial(serve_transfer, folder=folder, is_allowed=is_of_a_checkpoint, refuse=partial(_refuse_other_digest, folder))

    def close(self, trained: Trained) -> str | None:
        """Write the summary of the run; return a sentence if that fails."""
        try:
            write_text(self.folder / SUMMARY, json.dumps(trained.to_json(), indent=1) + "\n")
        except FileProblem as problem:
            return str(problem)
        return None


def events_before(num_steps: int, events: Iterator[Event]) -> Iterator[Event]:
    """The events of a record that belong to its first `num_steps` steps; later training is marked as redone.

    A spell of training is that of the step that follows it, else of the ops before it. The last report of a step counts: one that
    was run again after a checkpoint was loaded is reported twice.
    """
    spell, is_lost = None, False
    for event in events:
        if isinstance(event, Stepped):
            is_lost = event.iteration >= num_steps
        if spell is not None:
            yield replace(spell, state="redo", samples=0, discarded=spell.samples) if is_lost else spell
            spell = None
        if isinstance(event, OpRan | OpsRan) and not _is_undone(event):
            is_lost = event.iteration >= num_steps
        match event:
            case OpRan() | OpsRan() | Stepped() if event.iteration >= num_steps:
                pass
            case Spell(state="train"):
                spell = event
            case Held():
                pass  # it is about a whole run, and this one is not over
            case Saved() | Evaluated() if event.num_steps > num_steps:
                pass
            case _:
                yield event
    if spell is not None:
        yield replace(spell, state="redo", samples=0, discarded=spell.samples) if is_lost else spell


def without_unfinished(events: Sequence[Event]) -> list[Event]:
    """Leave out the events of a last step or recovery that a killed coordinator did not write to the end: they are written again.

    Ops and spells come before the event that completes them.
    """
    ends = [number for number, event in enumerate(events) if isinstance(event, Stepped | Recovered | Resumed)]
    num_complete = ends[-1] + 1 if ends else 0
    alone = (event for event in events[num_complete:] if not isinstance(event, Spell | OpRan | OpsRan) or _is_undone(event))
    return [*events[:num_complete], *alone]


def _cut_unfinished(path: Path) -> int:
    """Remove the events of an unfinished step or recovery from the end of a record; return how many bytes lie before them."""
    num_bytes = num_complete_bytes(path)
    kept = without_unfinished(events_after(path, num_bytes))
    os.truncate(path, num_bytes)
    writer = RecordWriter(path, None)
    writer.write(*kept)
    writer.close()
    return num_bytes


def _is_undone(event: Event) -> bool:
    return (isinstance(event, OpRan) and event.is_in_vain) or (isinstance(event, OpsRan) and event.is_undone)


def _rows_in(path: Path) -> Sequence[Row]:
    """The rows of the plan in a file, none if there is no plan; plans also hold their solving time, which rows do not."""
    try:
        return Plan.load(path).rows
    except UserError:
        return ()


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _refuse_other_digest(folder: Path, name: str, found: str) -> None:
    """Raise if a stage's file that was sent to a worker is not the one that was written."""
    checkpoint = read_checkpoint((folder / name).parent)
    if name.endswith(MANIFEST):  # which is checked when it is read
        return
    (file,) = [file for file in checkpoint.files if file.name == (folder / name).name]
    file.refuse_other_digest(folder / name, found)


def is_of_a_checkpoint(message: ControlMessage) -> bool:
    """Whether a worker may have this file stored, or sent."""
    match message:
        case UploadFile(name=name):
            return is_to_be_written(name)
        case DownloadFile(name=name):
            return is_to_be_read(name)
    return False
