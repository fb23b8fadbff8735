"""`SpeedPlanning`: the coordinator's requests for plans, with speeds and layers, and the change to a plan for other speeds.

Every worker says with its reports how long its ops took, and messages to it. A worker or link whose speed has changed is named
in the record. If a plan for the new speeds is worth a pause, all take it at the next iteration boundary. Failures are answered
with plans for known speeds.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from operator import itemgetter

from recycle.control.decide.coordinator import Coordinator
from recycle.control.decide.members import members_at
from recycle.control.drift.link_watch import LinkChange, LinkWatch
from recycle.control.drift.op_pace import Pace, parse_class
from recycle.control.drift.place_exchange import exchange_places
from recycle.control.drift.plan_change import TOO_SLOW, PlanChange, PlanPeriods, decide_change
from recycle.control.drift.relative_links import WorkerPair
from recycle.control.drift.relative_speeds import relative_speeds
from recycle.control.drift.speed_watch import SpeedWatch
from recycle.control.planning.failure_times import FailureTimes
from recycle.core.cluster import Worker
from recycle.core.events.record import LinkChanged, Recovered, SpeedChanged
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import PlanAssignment, RunLayers
from recycle.core.plans.steady_period import Speeds
from recycle.runtime.coordinator.config import CoordinatorConfig
from recycle.runtime.coordinator.ledger.run_ledger import RunLedger
from recycle.runtime.coordinator.plan_requests import PlanRequests
from recycle.runtime.worker.worker_reports import IterationApplied

# How long a change of plans takes, until the first one was measured.
_PAUSE_US = 250_000.0
# A worker may be left out after it was too slow for so long: a busy machine holds up healthy ones for seconds.
PATIENCE_US = 10_000_000


class SpeedPlanning:
    """Requests plans for the speeds of the members. All methods are called by the serving thread.

    `decide` returns the coordinator, which changes the plan, or lets a worker go that is too slow. If the job does not follow
    speeds, or its source of plans knows none, workers are named, and no plan is changed.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        plans: PlanRequests,
        ledger: RunLedger,
        call_soon: Callable[[Callable[[], None]], None],
        decide: Callable[[], Coordinator],
    ) -> None:
        self._plans, self._ledger, self._num_steps = plans, ledger, config.num_steps
        self._call_soon, self._decide, self._follows = call_soon, decide, config.follows_speeds and plans.knows_speeds
        self._watch, self._pause_us, self._is_comparing = SpeedWatch[int](), _PAUSE_US, False
        self._links = LinkWatch()
        self._plan = config.initial.plan
        self._members: Mapping[int, Worker] = {}
        self._first_iteration, self._named = 0, dict[Worker, float]()
        self._too_slow_since_us, self._postponed = dict[int, int](), set[int]()
        self._pending: dict[int, dict[int, IterationApplied]] = {}
        self._moves_layers = config.moves_layers
        self._failures = FailureTimes(ledger.now_us())
        self._prefetch()  # now, because workers take a while to join

    # Plans.

    def request(self, failed: frozenset[Worker]) -> None:
        self._plans.request(failed, self._speeds())

    def expect(self, failed: frozenset[Worker]) -> None:
        self._plans.expect(failed, self._speeds())

    def start_epoch(self, plan: Plan, iteration: int, places: Mapping[str, int]) -> None:
        """Note the plan of an epoch, and prepare plans for failures in it. A new member has the speed that the plan knows of it.

        So a coordinator that takes over has the speeds by which the plan in its journal was made.
        """
        members, planned = members_at(places), dict(plan.problem.speeds)
        self._watch.keep_only(members)
        for number in members.keys() - self._watch.known:
            self._watch.set_speed(number, planned.get(members[number], 1.0))
        self._plan, self._members, self._first_iteration = plan, members, iteration
        self._pending.clear()
        for link in self._links.start_epoch(members, iteration):
            self._name_link(link)
        for number, place in sorted(members.items(), key=itemgetter(1)):  # a member may have moved
            self._name(place, self._watch.speed(number), iteration)
        self._prefetch()
        self._consider()

    def _prefetch(self) -> None:
        self._plans.layers = self._layers()
        self._plans.prefetch(self._plan.problem.cluster.failed, self._speeds())

    def _layers(self) -> RunLayers | None:
        """The layers of the stages, if they may move, and the run's mean time between failures, if it is known."""
        counts, mean_time_us = self._plan.problem.layer_counts if self._moves_layers else (), self._failures.mean_us
        return RunLayers(counts, mean_time_us) if counts or mean_time_us is not None else None

    def _speeds(self) -> Speeds | None:
        """The speeds of all members at their places, those of 1 left out; before the first epoch, those of its plan."""
        if not self._follows:
            return None
        if not self._members:
            return self._plan.problem.speeds
        placed = [member for member in self._decide().members.placed if self._watch.speed(member.number) != 1]
        return tuple(sorted((member.place, self._watch.speed(member.number)) for member in placed if member.place is not None))

    def recovered(self, event: Recovered) -> None:
        """Note how long a change of plans took that lost no work, or how many workers failed."""
        if not event.workers:
            self._pause_us = event.lost_us
        elif not event.joins:
            before = self._failures.mean_us
            self._failures.add(event.at_us, len(event.workers))
            if self._failures.mean_us != before:
                self._prefetch()

    # Speeds.

    def add(self, member: int, report: IterationApplied) -> None:
        """Take the pace of a member, and the lags of messages. The first iteration of an epoch tells nothing: all is cold."""
        if report.iteration <= self._first_iteration or member not in self._members:
            return
        reports = self._pending.setdefault(report.iteration, {})
        reports[member] = report
        if len(reports) == len(self._members):
            for iteration in [each for each in self._pending if each <= report.iteration]:
                del self._pending[iteration]
            self._judge_links(report.iteration, reports)
            self._judge(report.iteration, {number: (each.worker, each.pace) for number, each in reports.items()})

    def _judge_links(self, iteration: int, reports: Mapping[int, IterationApplied]) -> None:
        lags = {number: each.lags for number, each in reports.items()}
        changes = list(self._links.add(iteration, lags, (each.pace for each in reports.values())))
        for link in changes:
            self._name_link(link)
        if slow := [link for link in changes if link.speed < 1]:
            self._go_around(max(slow, key=lambda link: link.delay_us))

    def _name_link(self, link: LinkChange) -> None:
        times = link.since, link.time_us, link.usual_us
        self._ledger.write(LinkChanged(self._ledger.now_us(), str(link.pair), link.speed, *times))

    def _go_around(self, link: LinkChange) -> None:
        """Have peers exchange their places, if messages then go around a slow link, and if that wins more than it costs.

        Its messages were waited for: without it, an iteration is shorter by the delay of at least one of them.
        """
        rows = {row.worker: row.worker for row in self._plan.rows}
        moved = self._exchanged(PlanAssignment(self._plan, rows, "")).moves
        if not self._follows or not moved:
            return
        present_us, num_left = self._ledger.recent_us, self._num_steps - self._ledger.num_steps
        periods = PlanPeriods(present_us, max(1, present_us - link.delay_us))
        if decide_change(periods, present_us, num_left, self._pause_us).change is PlanChange.REPLAN:
            places = ", ".join(f"{now} goes to {place}" for now, place in moved)
            self._decide().change_plan(f"the link {link.pair} is slow, and messages go around it: {places}")

    def exchanged(self, answer: PlanAssignment | str) -> PlanAssignment | str:
        """An answer to a request, with places of peers exchanged if messages then go around slow links."""
        return answer if isinstance(answer, str) else self._exchanged(answer)

    def _exchanged(self, assignment: PlanAssignment) -> PlanAssignment:
        members = self._decide().members.placed
        placed = {member.number: member.place for member in members if member.place is not None}
        delays_us = {
            WorkerPair(placed[first], placed[second]): float(link.delay_us)
            for (first, second), link in self._links.slow.items()
            if first in placed and second in placed
        }
        if not self._follows or not delays_us:
            return assignment
        speeds = {place: self._watch.speed(number) for number, place in placed.items()}
        return exchange_places(assignment, delays_us, lambda place: speeds.get(place, 1.0))

    def _judge(self, iteration: int, paces: Mapping[int, tuple[Worker, Pace]]) -> None:
        changes = self._watch.add(iteration, relative_speeds(paces, partial(_cost_us, self._plan)))
        for change in changes:
            self._name(self._members[change.member], change.speed, change.since)
            self._postponed.discard(change.member)
            if change.speed >= TOO_SLOW:
                self._too_slow_since_us.pop(change.member, None)
            else:
                self._too_slow_since_us.setdefault(change.member, self._ledger.now_us())
        if changes:
            self._consider()
            self._prefetch()
        elif due := {number for number in self._postponed & self._members.keys() if self._is_patience_over(number)}:
            self._postponed -= due
            self._consider(is_again=True)

    def _name(self, place: Worker, speed: float, since: int) -> None:
        """Write the speed of the worker at a place, unless it was written."""
        if self._named.get(place, 1.0) != speed:
            self._named[place] = speed
            self._ledger.write(SpeedChanged(self._ledger.now_us(), str(place), speed, since))

    def _consider(self, is_again: bool = False) -> None:
        """Have plans made for the present speeds and compared with the present plan, unless that is under way.

        A plan that is for these speeds is compared only `is_again`, with one without the slowest worker.
        """
        speeds, plan = self._speeds(), self._plan
        if speeds is None or self._is_comparing or (speeds == plan.problem.speeds and not is_again):
            return
        self._is_comparing = True
        slowest = min(self._members, key=self._watch.speed)
        without = self._members[slowest] if self._watch.speed(slowest) < TOO_SLOW else None

        def deliver(periods: PlanPeriods | None) -> None:
            self._call_soon(lambda: self._compared(plan, speeds, slowest, periods))

        self._plans.compare(plan, speeds, without, deliver)

    def _is_patience_over(self, member: int) -> bool:
        now_us = self._ledger.now_us()
        return now_us - self._too_slow_since_us.setdefault(member, now_us) >= PATIENCE_US

    def _compared(self, plan: Plan, speeds: Speeds, slowest: int, periods: PlanPeriods | None) -> None:
        self._is_comparing = False
        if plan is not self._plan or speeds != self._speeds():
            self._consider()
            return
        if periods is None:
            return
        if periods.without_us is not None and not self._is_patience_over(slowest):
            self._postponed.add(slowest)
            if periods.is_idle:
                return
            periods = replace(periods, without_us=None)
        num_left = self._num_steps - self._ledger.num_steps
        decision = decide_change(periods, self._ledger.recent_us, num_left, self._pause_us)
        match decision.change:
            case PlanChange.REPLAN:
                self._decide().change_plan(f"{_described(speeds)}; {decision.reason}")
            case PlanChange.LEAVE_OUT:
                place, speed = self._members[slowest], self._watch.speed(slowest)
                reason = f"it is left out: at {speed:g} of its peers' speed it holds up the others; {decision.reason}"
                self._ledger.warn(f"{place} leaves: {reason}; start another worker in its place")
                member = self._decide().members[slowest]
                member.is_leaving, member.leaves_because = True, reason
                self._decide().update_membership()


def _cost_us(plan: Plan, stage: int, name: str) -> int:
    """The planned time at speed 1 of an op of a class."""
    kind, layers = parse_class(name)
    held = plan.problem.held_layers
    return plan.problem.duration_us(stage, kind) if layers is None or held is None else held.sums.duration_us(kind, layers)


def _described(speeds: Speeds) -> str:
    """The speeds in words: of many workers only the slowest."""
    slowest = sorted(speeds, key=lambda each: each[1])[:3]
    if not slowest:
        return "all workers run at the speed of their peers again"
    named = ", ".join(f"{worker} at {speed:g}" for worker, speed in slowest)
    more = f" and {len(speeds) - len(slowest)} more" if len(speeds) > len(slowest) else ""
    return f"{named}{more} of the speed of peers"
