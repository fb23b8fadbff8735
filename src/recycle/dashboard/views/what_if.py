"""What if workers died: the plan for that, beside the plan of today."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import PlanSource
from recycle.dashboard.views.iteration_view import plan_lanes

# Makes, from the folder of a run and its present plan, the source that the run asks for plans; a function of a module.
MakeSource = Callable[[Path, Plan], PlanSource]
MOST_CHOSEN = 64


def read_workers(text: str) -> frozenset[Worker]:
    """Read workers such as `W0_1,W1_2`."""
    names = [name for name in text.split(",") if name]
    if len(names) > MOST_CHOSEN:
        raise UserError(f"{len(names)} workers are chosen, but at most {MOST_CHOSEN} can be: choose fewer")
    return frozenset(map(Worker.parse, names))


def what_if(make_source: MakeSource, folder: Path, today: Plan, dead: frozenset[Worker]) -> dict[str, Any]:
    """Return the plan that follows if exactly the places `dead` are empty; raises UserError if there is none.

    It may take long: it plans if no plan is ready.
    """
    answer = make_source(folder, today).answer(dead)
    plan = answer.plan
    return {
        **plan_lanes(plan),
        "asked": sorted(map(str, dead)),
        "reason": answer.reason,
        "moves": [f"{start}>{to}" for start, to in answer.moves],
        "copies": [f"{start}>{to}" for start, to in answer.copies],
        "today_us": today.period_us,
        "today_dead": sorted(map(str, today.problem.cluster.failed)),
        "bound_us": plan.quality.bound_us,
        "method": plan.quality.method,
    }
