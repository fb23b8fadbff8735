"""`PlanRequests`: the thread that fetches plans for the coordinator, from plans that are prefetched."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from queue import SimpleQueue

from recycle.control.decide.plan_prefetch import PlanPrefetch
from recycle.core.cluster import Shape, Worker
from recycle.core.errors import UserError
from recycle.core.plans.plan_source import NoWorkerLeft, PlanAssignment, PlanSource
from recycle.runtime.execute.spans import now_us

_MOST_WAIT_US = 5_000_000
PlanOutcome = PlanAssignment | str | UserError
"""A plan; the sentence why the live workers cannot hold every stage; or the error that ends the job."""


class PlanRequests:
    """Answers requests for plans in a thread of its own: a plan may take long, and connections do not wait for it.

    `deliver` is called in that thread, with each requested set of dead workers and its outcome.
    """

    def __init__(self, source: PlanSource, shape: Shape, deliver: Callable[[frozenset[Worker], PlanOutcome], None]) -> None:
        self._prefetch, self._shape, self._deliver = PlanPrefetch(source), shape, deliver
        self._requests: SimpleQueue[frozenset[Worker] | None] = SimpleQueue()
        self._ready_us = 0

    def start(self) -> None:
        threading.Thread(target=self._serve, daemon=True).start()

    def request(self, failed: frozenset[Worker]) -> None:
        self._requests.put(failed)

    def prefetch(self, failed: frozenset[Worker]) -> None:
        """Prepare plans for the changes of membership that may follow `failed`."""
        self._prefetch.prepare(failed, self._shape)

    def is_ready(self) -> bool:
        """Whether the planner is loaded, so that a first failure is answered soon; true after a few seconds in any case."""
        self._ready_us = self._ready_us or now_us() + _MOST_WAIT_US
        return self._prefetch.is_loaded or now_us() > self._ready_us

    def close(self) -> None:
        self._requests.put(None)
        self._prefetch.close()

    def _serve(self) -> None:
        while (failed := self._requests.get()) is not None:
            try:
                outcome = self._outcome(failed)
            except CancelledError:  # closed
                return
            self._deliver(failed, outcome)

    def _outcome(self, failed: frozenset[Worker]) -> PlanOutcome:
        try:
            return self._prefetch.answer(failed)
        except NoWorkerLeft as problem:
            return str(problem)
        except UserError as problem:
            return problem
