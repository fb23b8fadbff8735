"""`PlanRequests`: the coordinator's requests for plans, which are answered from prefetched plans."""

from collections.abc import Callable
from concurrent.futures import Future

from recycle.control.drift.plan_change import PlanPeriods
from recycle.control.planning.plan_prefetch import PlanPrefetch
from recycle.control.planning.planning_process import PlanningProcess
from recycle.core.cluster import Shape, Worker
from recycle.core.errors import ForeignPlan, PlannerFailed, UserError
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import NoWorkerLeft, PlanAssignment, PlanSource, RunLayers, SpeedAwareSource
from recycle.core.plans.steady_period import Speeds, with_speeds
from recycle.runtime.execute.spans import now_us

_MOST_WAIT_US = 5_000_000
PlanOutcome = PlanAssignment | str | UserError
"""A plan; the sentence why the live workers cannot hold every stage; or the error that ends the job."""


class PlanRequests:
    """Answers requests for plans without making the coordinator wait: a plan may take long. Without a source, it answers none.

    `deliver` is called with each requested set of dead workers and its outcome, by the thread that made the plan. All plans must
    be for as many `shared_layers` as the first one, and if no `layers` are set, for the same `layer_counts` at each stage.
    `knows_speeds` says whether plans are made for speeds of workers. `layers` are those of the stages, if plans may move them.
    """

    def __init__(
        self,
        source: PlanSource | None,
        shape: Shape,
        deliver: Callable[[frozenset[Worker], PlanOutcome], None],
        planning: PlanningProcess | None = None,
        shared_layers: int = 0,
        layer_counts: tuple[int, ...] = (),
    ) -> None:
        self._prefetch = PlanPrefetch(source, planning) if source is not None else None
        self._shape, self._deliver, self._shared_layers = shape, deliver, shared_layers
        self._ready_us, self.knows_speeds = 0, isinstance(source, SpeedAwareSource)
        self._layer_counts = layer_counts
        self.layers: RunLayers | None = None

    def request(self, failed: frozenset[Worker], speeds: Speeds | None = None) -> None:
        if self._prefetch is not None:  # without a source, the death has ended the job
            self._prefetch.request(failed, speeds, self.layers).add_done_callback(lambda future: self._done(failed, future))

    def expect(self, failed: frozenset[Worker], speeds: Speeds | None = None) -> None:
        """Have the plan at hand that is probably requested next, if it was made ahead."""
        if self._prefetch is not None:
            self._prefetch.expect(failed, speeds, self.layers)

    def prefetch(self, failed: frozenset[Worker], speeds: Speeds | None = None) -> None:
        """Prepare plans for the changes of membership that may follow `failed`."""
        if self._prefetch is not None:
            self._prefetch.prepare(failed, self._shape, speeds, self.layers)

    def compare(
        self, present: Plan, speeds: Speeds, without: Worker | None, deliver: Callable[[PlanPeriods | None], None]
    ) -> None:
        """Plan for these speeds, and once more without a worker if one is named; then compare both with the present plan.

        `deliver` is called with the periods, by the thread that has computed them; with None if there is no such plan.
        """
        if self._prefetch is None:
            return
        failed, prefetch = present.problem.cluster.failed, self._prefetch
        sets = [failed] if without is None else [failed, failed | {without}]
        made = [prefetch.request(each, speeds, self.layers) for each in sets]

        def compare(done: int) -> None:
            if done < len(made):
                made[done].add_done_callback(lambda future: compare(done + 1))
                return
            found = [None if future.cancelled() or future.exception() is not None else future.result() for future in made]
            if (new := found[0]) is None:
                deliver(None)
                return
            others = [assignment.plan for assignment in found[1:] if assignment is not None]
            periods = prefetch.compare([with_speeds(present, speeds), new.plan, *others])
            periods.add_done_callback(lambda future: deliver(_periods(future, new, without)))

        compare(0)

    def is_ready(self) -> bool:
        """Whether the planner is loaded, so that a first failure is answered soon; true after a few seconds in any case."""
        self._ready_us = self._ready_us or now_us() + _MOST_WAIT_US
        return self._prefetch is None or self._prefetch.is_loaded or now_us() > self._ready_us

    def close(self) -> None:
        if self._prefetch is not None:
            self._prefetch.close()

    def _done(self, failed: frozenset[Worker], future: Future[PlanAssignment]) -> None:
        if not future.cancelled():
            self._deliver(failed, self._checked(_outcome(future)))

    def _checked(self, outcome: PlanOutcome) -> PlanOutcome:
        """The outcome, or an error if the plan needs other layers than workers hold: they would compute something else."""
        if not isinstance(outcome, PlanAssignment):
            return outcome
        if (shared := outcome.plan.problem.shared_layers) != self._shared_layers:
            held = f"the workers of this job share {self._shared_layers}"
            return ForeignPlan(f"the plan after a failure is for stages that share {shared} layers, but {held}: plan again")
        counts, own = outcome.plan.problem.layer_counts, self._layer_counts
        if counts != own and ((shared and self.layers is None) or (self.layers is not None and sum(counts) != sum(own))):
            found, has = (", ".join(map(str, each)) for each in (counts, own))
            return ForeignPlan(f"the plan after a failure is for stages of {found} layers, but this job has {has}: plan again")
        return outcome


def _periods(future: Future[list[int]], new: PlanAssignment, slowest: Worker | None) -> PlanPeriods | None:
    """The periods of the present plan, of the new one, and of one without the slowest worker, if there is such a plan."""
    if future.cancelled():
        return None
    present_us, new_us, *without_us = future.result()
    rows = [row for row in new.plan.rows if new.places[row.worker] == slowest]
    return PlanPeriods(present_us, new_us, without_us[0] if without_us else None, not any(row.kinds for row in rows))


def _outcome(future: Future[PlanAssignment]) -> PlanOutcome:
    try:
        return future.result()
    except NoWorkerLeft as problem:
        return str(problem)
    except UserError as problem:
        return problem
    except Exception as problem:  # a mistake of the planner: without an outcome the job would wait for ever
        return PlannerFailed(f"the planner failed: {type(problem).__name__}: {problem}")
