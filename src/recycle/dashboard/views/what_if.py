"""What if workers died: the plan for that, beside the plan of today."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import PlanSource, SpeedAwareSource
from recycle.core.plans.steady_period import Speeds, steady_period_us, with_speeds
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


def what_if(make_source: MakeSource, folder: Path, today: Plan, dead: frozenset[Worker], speeds: Speeds = ()) -> dict[str, Any]:
    """Return the plan that follows if exactly the places `dead` are empty; raises UserError if there is none.

    The run would plan for the `speeds` of its workers. It may take long: it plans if no plan is ready.
    """
    source, today_us = make_source(folder, today), today.period_us
    if speeds and isinstance(source, SpeedAwareSource):
        source, today_us = source.at_speeds(speeds), steady_period_us(with_speeds(today, speeds))
    answer = source.answer(dead)
    plan = answer.plan
    return {
        **plan_lanes(plan),
        "asked": sorted(map(str, dead)),
        "reason": answer.reason,
        "moves": [f"{start}>{to}" for start, to in answer.moves],
        "copies": [f"{start}>{to}" for start, to in answer.copies],
        "today_us": today_us,
        "speeds": {str(worker): speed for worker, speed in plan.problem.speeds},
        "today_dead": sorted(map(str, today.problem.cluster.failed)),
        "bound_us": plan.quality.bound_us,
        "method": plan.quality.method,
    }
