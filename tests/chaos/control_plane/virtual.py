"""A coordinator's server, background threads, planner and clock that do not wait: a scheduler decides when each of them acts."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from recycle.control.decide.messages import ControlMessage
from recycle.control.drift import speed_watch
from recycle.control.drift.plan_change import PlanPeriods, decide_change
from recycle.control.store.protocol import StoreAway
from recycle.core.cluster import Shape, Worker
from recycle.core.errors import LeadershipLost
from recycle.core.plans.plan import Plan
from recycle.core.plans.steady_period import Speeds
from recycle.runtime.coordinator import background, fencing, leadership, run_output, service, speed_planning
from recycle.runtime.coordinator.ledger import recovered_event, run_ledger
from recycle.runtime.coordinator.service import CoordinatorService
from tests.control.decide.coordinator_harness import answer_for, evened

if TYPE_CHECKING:
    from tests.chaos.control_plane.plane import CoordinatorProcess

# The virtual time, and the control plane that it is the time of.
CLOCK = SimpleNamespace(now_us=0, plane=None)


class VirtualServer:
    """A server without sockets; the coordinator's process takes the place of the listener."""

    def __init__(self, process: "CoordinatorProcess", token: str, callbacks: CoordinatorService, tls: None) -> None:
        self.process, self.callbacks = process, callbacks
        self.calls: deque[Callable[[], None]] = deque()
        self.backgrounds: list[VirtualBackground] = []
        self.is_stopped = False
        self.leadership: VirtualLeadership
        process.server = self

    def call_soon(self, function: Callable[[], None]) -> None:
        self.calls.append(function)

    def send_encoded(self, number: int, message: ControlMessage) -> None:
        """Send an encoded message, which is the message itself here: see `virtual`."""
        self.send(number, message)

    def send(self, number: int, message: ControlMessage) -> None:
        if (worker := self.process.connected.get(number)) is not None:
            worker.inbox.append(message)

    def disconnect(self, number: int) -> None:
        self.process.close(number)

    def stop(self) -> None:
        self.is_stopped = True


class TryLater(Exception):
    """A job of a background thread waits, and is done again when the scheduler says so."""


class VirtualLeadership:
    """The leadership of a coordinator, which the plane renews as long as its process is not frozen."""

    def __init__(self, store: Any, call_soon: Any, away: Callable[[str], None], back: Callable[[], None], lost: Any) -> None:
        self._store, self._call_soon, self._away, self._back, self._lost = store, call_soon, away, back, lost
        self._certain_until_us, self._is_told, self._is_awaited = 0, False, False
        call_soon.__self__.leadership = self
        self.renew()

    @property
    def is_certain(self) -> bool:
        return not self._store.lease_s or CLOCK.now_us < self._certain_until_us

    def expect_back(self) -> None:
        self._is_awaited = True

    def renew(self) -> None:
        if not self._store.lease_s:
            return
        try:
            self._store.renew()
        except StoreAway as problem:
            if not self.is_certain and not self._is_told:
                self._is_told = True
                self._call_soon(partial(self._away, str(problem)))
        except LeadershipLost as problem:
            self._call_soon(partial(self._lost, problem))
        else:
            self._certain_until_us = CLOCK.now_us + round(self._store.lease_s * 1e6)
            if self._is_told or self._is_awaited:
                self._is_told = self._is_awaited = False
                self._call_soon(self._back)

    def close(self) -> None:
        pass


class VirtualBackground:
    """A background thread whose next job runs when the scheduler says so."""

    def __init__(self, name: str, call_soon: Any, gathers: bool = False) -> None:
        """Whether it `gathers` or not: what the jobs of one turn do is done in order either way, at any time."""
        self._server: VirtualServer = call_soon.__self__
        self._server.backgrounds.append(self)
        self.jobs: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()

    def run(self, job: Callable[[], Any], then: Callable[[Any], None] = lambda result: None) -> None:
        self.jobs.append((job, then))

    def run_next(self) -> None:
        job, then = self.jobs.popleft()
        try:
            result = job()
        except TryLater:
            self.jobs.appendleft((job, then))
            return
        self._server.call_soon(lambda: then(result))

    def close(self) -> None:
        pass


class VirtualPlans:
    """Plans that come when the scheduler says so."""

    def __init__(
        self, source: "CoordinatorProcess", shape: Shape, deliver: Callable[..., None], planning: None, *held: object
    ) -> None:
        self._plane, self._deliver = source.plane, deliver
        self.requests: deque[Callable[[], None]] = deque()
        self.knows_speeds, self.layers = True, None
        source.plans = self

    def request(self, failed: frozenset[Worker], speeds: Speeds | None) -> None:
        shape = self._plane.shape
        planned = evened(shape, failed) if self._plane.is_moving else None
        self.requests.append(lambda: self._deliver(failed, answer_for(shape, failed, planned)))

    def compare(self, present: Plan, speeds: Speeds, without: Worker | None, deliver: Callable[..., None]) -> None:
        new_us = self._plane.random.choice([500, 1000])
        without_us = self._plane.random.choice([400, 1000]) if without is not None else None
        self.requests.append(lambda: deliver(PlanPeriods(1000, new_us, without_us)))

    def make_next(self) -> None:
        self.requests.popleft()()

    def prefetch(self, failed: frozenset[Worker], speeds: Speeds | None) -> None:
        pass

    def expect(self, failed: frozenset[Worker], speeds: Speeds | None) -> None:
        pass

    def is_ready(self) -> bool:
        return True


@contextmanager
def virtual() -> Iterator[None]:
    """Replace what waits, in all modules of the coordinator."""

    def now_us() -> int:
        return CLOCK.now_us

    def wait_to_retry(closing: object) -> bool:
        raise TryLater

    with (
        patch.multiple(service, Server=VirtualServer, PlanRequests=VirtualPlans, now_us=now_us),
        patch.multiple(leadership, Leadership=VirtualLeadership, encode=lambda message: message),
        patch.object(background, "wait_to_retry", wait_to_retry),
        patch.object(fencing, "fence", lambda member: CLOCK.plane.fence(member)),
        patch.object(CoordinatorService, "is_process_running", lambda self, member: False),
        patch.object(fencing, "identify", lambda member: None),
        patch.object(run_ledger, "now_us", now_us),
        patch.object(recovered_event, "now_us", now_us),
        # A job has few iterations here, which take no time: speeds change at once, and every gain is worth a pause.
        patch.object(speed_watch, "HOLD", 1),
        patch.object(speed_planning, "decide_change", lambda periods, *others: decide_change(periods, 1.0, 1000, 0.0)),
        patch.object(background, "Background", VirtualBackground),
        patch.object(run_output, "Background", VirtualBackground),
    ):
        yield
