"""Prefetched plans: while training runs, a process of low priority plans for the failures and returns that may come next.

One thread of this process owns the planning process. It makes one request at a time and keeps the plans, so an urgent request
waits for one plan at most, and nothing has to be cancelled when the likely failures change.
"""

import atexit
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from multiprocessing import get_context

from recycle.control.planning.kept_plans import CompressedAssignment, Failed, KeptPlans, PlanRequest, for_others, num_dead_at
from recycle.control.planning.planning_process import PlanningProcess, plan_or_error
from recycle.core.cluster import Shape
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import PlanAssignment, PlanSource, RunLayers
from recycle.core.plans.steady_period import Speeds, steady_period_us

# The most plans that are kept, and the most ops in all of them: packed, they take some eight bytes each.
_MOST_PLANS, _MOST_OPS = 400, 50_000_000
# A request that has ended so many planning processes is answered in this process.
_MOST_PROCESSES = 2
_ALL = sys.maxsize


def likely_failures(failed: Failed, shape: Shape, most: int = _MOST_PLANS) -> list[Failed]:
    """Return the sets of dead workers that may follow, the most urgent first: one more failure, one return, the same set.

    If these are more than `most`, one worker stands for all its peers: they can exchange places.
    """
    failures = [failed | {worker} for worker in shape.workers() if worker not in failed]
    returns = [failed - {worker} for worker in sorted(failed)]
    if len(failures) + len(returns) + 1 > most:
        failures, returns = _one_a_stage(failures), _one_a_stage(returns)
    return [*failures, *returns, failed][:most]


def _one_a_stage(sets: Sequence[Failed]) -> list[Failed]:
    """Leave out sets that have as many dead at every stage as another one."""
    return list({tuple(sorted(num_dead_at(each).items())): each for each in sets}.values())


class PlanPrefetch:
    """A source of plans that has most of them ready. Any thread may use it; `close` ends the planning process.

    `first` is a planning process that has started already; without it, and after its death, the prefetch starts one. `is_loaded`
    says that a request was answered already: the planner is loaded, so that the next plans take less time.
    """

    def __init__(self, source: PlanSource, first: PlanningProcess | None = None) -> None:
        self._source = source
        self._changed = threading.Condition()  # it guards all attributes below
        self._urgent: dict[PlanRequest, Future[PlanAssignment]] = {}
        self._compared: deque[tuple[Sequence[Plan], Future[list[int]]]] = deque()
        self._queue: deque[PlanRequest] = deque()
        self._wanted: frozenset[PlanRequest] = frozenset()
        self._kept = KeptPlans()
        self._unpacked: tuple[PlanRequest, Future[PlanAssignment]] | None = None
        self._most_kept, self._stand_for_peers = _MOST_PLANS, False
        self._process: PlanningProcess | None = None
        self._first = first
        self.is_loaded = self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="plan prefetch", daemon=True)
        self._thread.start()
        # Before multiprocessing ends our process itself at exit, which would look like a death and have another one started.
        atexit.register(self.close)

    def prepare(self, failed: Failed, shape: Shape, speeds: Speeds | None = None, layers: RunLayers | None = None) -> None:
        """Plan for the sets of dead workers that may follow `failed`, instead of those of the last call."""
        num_ops = 3 * shape.num_stages * shape.num_chains
        most = max(1, min(_MOST_PLANS, _MOST_OPS // num_ops))
        likely = [PlanRequest(each, speeds, layers) for each in likely_failures(failed, shape, most)]
        with self._changed:
            self._most_kept, self._wanted = most, frozenset(likely)
            self._stand_for_peers = len(likely) < len(likely_failures(failed, shape, _ALL))
            self._queue = deque(likely)
            self._kept.remove_others(self._wanted, most)
            self._unpacked = None  # it is in use, or of no use: it need not stay in memory
            self._changed.notify_all()

    def request(self, failed: Failed, speeds: Speeds | None = None, layers: RunLayers | None = None) -> Future[PlanAssignment]:
        """Return the plan, which is made next unless it is ready; `close` cancels it."""
        request = PlanRequest(failed, speeds, layers)
        with self._changed:
            if request in self._urgent:
                return self._urgent[request]
            if self._unpacked is not None and self._unpacked[0] == request:
                return self._unpacked[1]
            future: Future[PlanAssignment] = Future()
            planned = self._planned_for(request)
            kept = self._kept.get(planned) if planned is not None else None
            if isinstance(kept, PlanAssignment):
                future.set_result(kept if planned == request else for_others(kept, failed))
            elif kept is not None:  # in a thread of its own: that of the prefetch may wait for the planning process
                self._unpacked = request, future  # it may be requested again soon
                args = (kept, failed if planned != request else None, future)
                threading.Thread(target=_unpack_into, args=args, name="unpack plan", daemon=True).start()
            elif self._is_closed:
                future.cancel()
            else:
                self._urgent[request] = future
                self._changed.notify_all()
            return future

    def expect(self, failed: Failed, speeds: Speeds | None = None, layers: RunLayers | None = None) -> None:
        """Unpack the plan for these dead workers, if it was made ahead: it is probably requested next."""
        with self._changed:
            if self._planned_for(PlanRequest(failed, speeds, layers)) in self._kept:
                self.request(failed, speeds, layers)

    def compare(self, plans: Sequence[Plan]) -> Future[list[int]]:
        """Return the steady period of each plan, as soon as no plan is requested; `close` cancels it."""
        future: Future[list[int]] = Future()
        with self._changed:
            if self._is_closed:
                future.cancel()
            else:
                self._compared.append((plans, future))
                self._changed.notify_all()
        return future

    def _planned_for(self, request: PlanRequest) -> PlanRequest | None:
        """The request whose plan is kept and answers this one, if there is one."""
        return request if request in self._kept or not self._stand_for_peers else self._kept.alike(request)

    def close(self) -> None:
        """End the planning process at once, and cancel the requests."""
        with self._changed:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()
            unanswered, self._urgent = self._urgent, {}
            compared, self._compared = self._compared, deque()
            self._changed.notify_all()
        for future in unanswered.values():
            future.cancel()
        for _, waiting in compared:
            waiting.cancel()
        self._thread.join()
        self._kept.clear()
        atexit.unregister(self.close)

    # The methods below run in the prefetch's own thread.

    def _work(self) -> None:
        try:
            while (task := self._next_task()) is not None:
                if isinstance(task, PlanRequest):
                    self._deliver(task, self._outcome(task))
                else:
                    self._compare(*task)
        finally:
            self._end_process()

    def _next_task(self) -> PlanRequest | tuple[Sequence[Plan], Future[list[int]]] | None:
        """Wait for a request, the urgent ones first, or for plans to compare; None when closed."""
        with self._changed:
            while not self._is_closed:
                if self._urgent:
                    return next(iter(self._urgent))
                if self._compared:
                    return self._compared.popleft()
                while self._queue:
                    request = self._queue.popleft()
                    if request not in self._kept:
                        return request
                self._changed.wait()
            return None

    def _compare(self, plans: Sequence[Plan], future: Future[list[int]]) -> None:
        try:
            future.set_result(self._running_process().periods_us(plans))
        except Exception:  # the process is dead, or closed: what is computed here holds up this thread alone
            self._end_process()
            with self._changed:
                is_closed = self._is_closed
            if is_closed:
                future.cancel()
            else:
                future.set_result([steady_period_us(plan) for plan in plans])

    def _outcome(self, request: PlanRequest) -> PlanAssignment | CompressedAssignment | Exception | None:
        """Plan in the planning process; in this process if the request is urgent and ends planning processes; else None."""
        for _ in range(_MOST_PROCESSES):
            try:
                return self._running_process().plan(request)
            except (EOFError, OSError):
                self._end_process()
            except Exception as problem:  # closed meanwhile, or something that cannot be pickled
                self._end_process()
                return problem
        with self._changed:
            is_urgent = request in self._urgent
        return plan_or_error(self._source, request) if is_urgent else None

    def _running_process(self) -> PlanningProcess:
        if self._process is not None:
            return self._process
        started, self._first = self._first or PlanningProcess(get_context("spawn")), None
        with self._changed:
            self._process = started
            if self._is_closed:
                raise CancelledError("no plans are made any more")
        started.send_source(self._source)
        return started

    def _end_process(self) -> None:
        with self._changed:
            processes, self._process, self._first = (self._process, self._first), None, None
        for process in processes:
            if process is not None:
                process.end()

    def _deliver(self, request: PlanRequest, outcome: PlanAssignment | CompressedAssignment | Exception | None) -> None:
        """Keep a plan, and hand it to the thread that waits for it. Errors are not kept: the next try may succeed."""
        self.is_loaded = True
        if outcome is None:
            return
        with self._changed:
            future = self._urgent.pop(request, None)
            if not isinstance(outcome, Exception):
                self._kept[request] = outcome
                self._kept.remove_others(self._wanted, self._most_kept)
        if future is None:
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome if isinstance(outcome, PlanAssignment) else outcome.unpack())


def _unpack_into(plan: CompressedAssignment, failed: Failed | None, future: Future[PlanAssignment]) -> None:
    """Unpack a plan, and hand it over; with `failed`, for these dead workers instead of those it was made for."""
    try:
        assignment = plan.unpack()
        future.set_result(assignment if failed is None else for_others(assignment, failed))
    except Exception as problem:  # whoever waits for it must hear of it
        future.set_exception(problem)
