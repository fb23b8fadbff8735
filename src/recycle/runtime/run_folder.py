"""The folder of a run: its plan, its record, its checkpoints, its summary; new, or one to go on with."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from recycle.core.errors import FileProblem
from recycle.core.files import refuse_unwritable, write_text
from recycle.core.record import Event, Held, OpRan, RecordWriter, Saved, Spell, Started, Stepped, Warned, read_record
from recycle.runtime.books import Trained
from recycle.runtime.checkpoint import Checkpoint, Checkpoints, latest
from recycle.runtime.job import Job, Saving


class RunFolder:
    """A context in which a run is recorded. `resumed` is where it goes on; `gone_us` and `losses` are of what it has done."""

    def __init__(self, folder: Path, job: Job, every: int, keep: int, resume: bool, name: str) -> None:
        refuse_unwritable(folder / "summary.json")
        self.folder = folder
        self.saving = Saving(folder / "checkpoints", every, keep)
        self.resumed: Checkpoint | None = None
        self.warnings: list[str] = []
        self.gone_us = 0
        self.losses: list[float] = []
        before: list[Event] = [Started("train", name)]
        if resume:
            self.resumed, self.warnings = latest(self.saving.folder, job.fingerprint())
            before = list(led_to(self.resumed.num_steps, read_record(folder / "record.jsonl")))
            self.gone_us = max((_end_us(event) for event in before), default=0)
            steps = (event for event in before if isinstance(event, Stepped))
            self.losses = [step.loss if step.loss is not None else math.nan for step in steps]
        elif self.saving.folder.is_dir() and any(self.saving.folder.iterdir()):
            raise FileProblem(f"{folder} holds the checkpoints of another run: resume it, or name another folder")
        job.plan.save(folder / "plan.json")
        self._record = RecordWriter(folder / "record.jsonl", before)
        self.checkpoints = Checkpoints(self.saving.folder, len(job.stages), keep, job.fingerprint())

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self._record.close()

    def write(self, event: Event) -> None:
        self._record.write(event)

    def close(self, trained: Trained) -> None:
        """Write what the run came to."""
        write_text(self.folder / "summary.json", json.dumps(trained.to_json(), indent=1) + "\n")


def led_to(num_steps: int, events: Iterator[Event]) -> Iterator[Event]:
    """What of a record led to its first `num_steps` steps; what came after was in vain, since it is to be done again."""
    is_lost = False
    for event in events:
        match event:
            case OpRan() | Stepped() if event.iteration >= num_steps:
                is_lost = True
            case Spell(state="train") if is_lost:
                yield replace(event, state="redo", samples=0, discarded=event.samples)
            case Held():
                pass  # it says what a whole run held, and that is not over
            case _:
                yield event


def _end_us(event: Event) -> int:
    match event:
        case OpRan() | Spell():
            return event.end_us
        case Stepped() | Saved() | Warned():
            return event.at_us
        case _:
            return 0
