"""The files of a run: its record, its summary, the plan of each epoch; and the choice of the plan that a report is about.

A report compares a run with one plan: the plan of the requested iteration; else the first plan; and if no iteration was
completed by the first plan, because a worker died in the first iteration, the plan of the most iterations.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recycle.core.errors import FileProblem
from recycle.core.events.record_file import PLAN, RECORD, SUMMARY, later_plans
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import check
from recycle.report.record.gaps import iterations_without_plan, plan_gaps, step_gaps
from recycle.report.record.run_columns import RunRecord, completed_us
from recycle.report.record.run_summary import Summary


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of one run: its record, its plans, and the content of its summary; None while it has none.

    `later_plans` are by the iteration from which each was used; a user who names one plan gives none of them.
    """

    record: Path
    first_plan: Path
    later_plans: Mapping[int, Path]
    summary: dict[str, Any] | None
    is_folder: bool
    has_all_plans: bool

    @staticmethod
    def find(path: Path, plan: Path | None) -> "RunFiles":
        """Return the files of a run that is named by its folder or by its record."""
        try:
            is_folder = path.is_dir()
            if not path.exists():
                raise FileProblem(f"cannot read {path}: there is no such folder or file; give the folder of a run, or a record")
        except OSError as problem:
            raise FileProblem(f"cannot read {path}: {problem.strerror or problem}") from None
        record = path / RECORD if is_folder else path
        if not record.exists():
            raise FileProblem(f"{path} is not the folder of a run: it has no {RECORD}; give one that 'recycle train --out' wrote")
        first_plan, later = (plan, {}) if plan else (record.parent / PLAN, later_plans(record.parent))
        if not first_plan.exists():
            raise FileProblem(f"cannot read the plan of this run: there is no {first_plan}; give its plan with --plan FILE")
        summary = _read_summary(record.parent / SUMMARY) if is_folder else None
        return RunFiles(record, first_plan, later, summary, is_folder, has_all_plans=plan is None)

    def plan_of(self, iteration: int) -> Path:
        """The plan that an iteration was executed by."""
        begun = [number for number in self.later_plans if number <= iteration]
        return self.later_plans[max(begun)] if begun else self.first_plan

    @property
    def weights_sha256(self) -> str | None:
        digest = (self.summary or {}).get("weights_sha256")
        return str(digest) if digest else None

    def has_ended(self, run: RunRecord) -> bool:
        """Whether the run ended: it has a summary, and no step was taken since, by a run that was resumed."""
        if self.summary is None:
            return False
        num_steps = self.summary.get("steps")
        return not (isinstance(num_steps, int) and run.steps and num_steps <= run.steps[-1].iteration)

    def state_text(self, run: RunRecord) -> str:
        """Say whether the run ended, and with which weights."""
        if self.has_ended(run):
            return f"to its end; weights sha256 {self.weights_sha256}" if self.weights_sha256 else "to its end"
        if not self.is_folder:
            return f"from {self.record}"
        why = f"there is no {SUMMARY}" if self.summary is None else f"{SUMMARY} is from before it was resumed"
        return f"which goes on or was cut off: {why}"


def _read_summary(path: Path) -> dict[str, Any] | None:
    """Return the summary that a run wrote at its end; None if it was cut off before."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as problem:
        raise FileProblem(f"cannot read {path} ({problem}): remove it, and the report does without") from None
    return data if isinstance(data, dict) else {}


def summarize(run: RunRecord, files: RunFiles, iteration: int | None, gaps: Sequence[str] = ()) -> tuple[Summary, Path]:
    """Return the run beside one of its plans, that of `iteration` if it is given, and the file of that plan.

    `gaps` says which lines of the record are missing.
    """
    first = load_legal_plan(files.first_plan)
    counted = run.ops.chosen(~run.ops.in_vain)
    plan_of = {number: files.plan_of(number) for number in completed_us(counted, first.problem.shape)}
    without_plan = iterations_without_plan(counted, plan_of) if run.recoveries and files.has_all_plans else set()
    gaps = [*gaps, *step_gaps(run, (files.summary or {}).get("steps")), *plan_gaps(without_plan)]
    if not files.later_plans:  # a run of one epoch, or without later plans: then its ops say which iterations are of this plan
        return Summary(run, first, gaps=gaps), files.first_plan
    texts = _plan_texts(files)
    known = set(run.ops.iteration.tolist()) - without_plan
    text_of = {number: texts[files.plan_of(number)] for number in sorted(known)}
    num_completed = Counter(text_of[number] for number in plan_of if number in text_of)
    if iteration in text_of:
        chosen = text_of[iteration]
    elif num_completed[texts[files.first_plan]] or not num_completed:
        chosen = texts[files.first_plan]
    else:
        chosen = num_completed.most_common(1)[0][0]
    path = next(path for path, text in texts.items() if text == chosen)
    plan = first if path == files.first_plan else load_legal_plan(path)
    return Summary(run, plan, [number for number, text in text_of.items() if text == chosen], gaps), path


def _plan_texts(files: RunFiles) -> dict[Path, bytes]:
    """Return the content of each plan file without the plan's quality, so that equal plans of two epochs are the same."""
    try:
        return {path: path.read_bytes().partition(b'"problem"')[2] for path in (files.first_plan, *files.later_plans.values())}
    except OSError as problem:
        raise FileProblem(f"cannot read {problem.filename}: {problem.strerror or problem}") from None


def load_legal_plan(path: Path) -> Plan:
    """Load a plan, and refuse it unless it is legal."""
    plan = Plan.load(path)
    if broken := check(plan):
        raise FileProblem(f"{path} is not a legal plan, so nothing can be held against it ({broken[0]})")
    return plan
