"""The timelines of a report: one iteration of a run as it was executed, and the same as planned, with their titles."""

from collections.abc import Collection
from dataclasses import replace

from recycle.core.cluster import Worker
from recycle.core.units import format_us
from recycle.report.record.run_summary import Summary
from recycle.report.timeline.plan_timeline import plan_timeline
from recycle.report.timeline.run_timeline import run_timeline
from recycle.report.timeline.timeline import Timeline


def executed_timeline(summary: Summary, iteration: int, workers: Collection[Worker] | None = None) -> Timeline:
    """Return the timeline of an executed iteration, of these workers or of all."""
    executed = summary.executed
    rating = (
        f"{format_us(executed.length_us(iteration))} since the end of the iteration before",
        f"the median is {format_us(summary.times.median_us)}",
        f"workers in bubbles {summary.bubble:.0%} over the run",
    )
    events = summary.run.ops.events(range(iteration - 1, iteration + 2), workers)
    timeline = run_timeline(summary.plan.problem, events, iteration, rating, executed.windows(iteration))
    return replace(timeline, about=(f"iteration {iteration} as executed", *timeline.about))


def planned_timeline(summary: Summary) -> Timeline:
    """Return the timeline of the plan; its title gives the period at the measured speed of the ops."""
    period = f"a period of {format_us(round(summary.executed.promised_us))} at the speed at which ops ran"
    return replace(plan_timeline(summary.plan), about=("as planned", period))
