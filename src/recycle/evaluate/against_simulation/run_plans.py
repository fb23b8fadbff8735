"""The plans of a run: the one that it began with, those of its later epochs, and which of them a report is about.

Numbers and charts of a report are beside one plan. It is that of the iteration that is asked for; else the one that the run began
with; and if no iteration went by that one to its end, because somebody died in the first, the one that most went by.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from recycle.core.errors import FileProblem
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import check
from recycle.evaluate.against_simulation.epoch_comparison import whole_ends_us
from recycle.report.record.run_columns import RunRecord
from recycle.report.record.run_summary import Summary


@dataclass(frozen=True, slots=True)
class Plans:
    """Where the plans of a run lie: `first`, and `later` ones by the iteration from which each was gone by."""

    first: Path
    later: Mapping[int, Path] = field(default_factory=dict)

    def of(self, iteration: int) -> Path:
        """The plan that an iteration went by."""
        begun = [number for number in self.later if number <= iteration]
        return self.later[max(begun)] if begun else self.first


def summarize(run: RunRecord, plans: Plans, iteration: int | None) -> tuple[Summary, Path]:
    """Return the run beside one of its plans, which `iteration`, if it is given, went by; and where that plan lies."""
    first = load_plan(plans.first)
    if not plans.later:  # of one epoch, or recorded without them: then ops tell what went by this plan
        return Summary(run, first), plans.first
    texts = _texts(plans)
    went_by = {number: texts[plans.of(number)] for number in sorted(set(run.ops.iteration.tolist()))}
    counted = run.ops.chosen(~run.ops.in_vain)
    whole = Counter(went_by[number] for number in whole_ends_us(counted, first.problem.shape))
    if iteration in went_by:
        chosen = went_by[iteration]
    elif whole[texts[plans.first]] or not whole:
        chosen = texts[plans.first]
    else:
        chosen = whole.most_common(1)[0][0]
    path = next(path for path, text in texts.items() if text == chosen)
    plan = first if path == plans.first else load_plan(path)
    return Summary(run, plan, [number for number, text in went_by.items() if text == chosen]), path


def _texts(plans: Plans) -> dict[Path, bytes]:
    """What each file holds, without how the plan was found: one that was gone by twice lies there twice, but is the same."""
    try:
        return {path: path.read_bytes().partition(b'"problem"')[2] for path in (plans.first, *plans.later.values())}
    except OSError as problem:
        raise FileProblem(f"cannot read {problem.filename}: {problem.strerror or problem}") from None


def load_plan(path: Path) -> Plan:
    """Return a plan that is legal."""
    plan = Plan.load(path)
    if broken := check(plan):
        raise FileProblem(f"{path} is not a legal plan, so nothing can be held against it ({broken[0]})")
    return plan
