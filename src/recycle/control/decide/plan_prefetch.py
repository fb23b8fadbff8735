"""Plans made ahead: while training runs, a process of low priority plans for whatever may happen next.

One thread of this process owns the other one. It asks one question at a time and keeps the answers, so an urgent question waits
for one plan at most, and nothing has to be taken back when others become the next ones. A process that dies is started anew.
"""

import atexit
import os
import threading
from collections import deque
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

from recycle.core.cluster import Shape, Worker
from recycle.core.plans.plan_source import PlanAssignment, PlanSource
from recycle.host.process_lifetime import children_uninterrupted, end_with_parent

Dead = frozenset[Worker]

# Answers to keep, and the ops in all of them, at some twenty bytes each.
_MOST_ANSWERS, _MOST_OPS = 400, 20_000_000
# A question that has ended so many processes is answered in this one.
_MOST_PROCESSES = 2
_NICENESS = 5


def likely_failures(failed: Dead, shape: Shape) -> list[Dead]:
    """What may be asked next, the most pressing first: one more failure, one worker back, and the same again."""
    failures = [failed | {worker} for worker in shape.workers() if worker not in failed]
    returns = [failed - {worker} for worker in sorted(failed)]
    return [*failures, *returns, failed]


class PlanPrefetch:
    """A source of plans that has most of them ready. Any thread may ask; `close` it in the end."""

    def __init__(self, source: PlanSource, context: SpawnContext | ForkServerContext | None = None) -> None:
        self._source = source
        self._context = context or get_context("spawn")
        self._changed = threading.Condition()  # it guards everything below
        self._urgent: dict[Dead, Future[PlanAssignment]] = {}
        self._waiting: deque[Dead] = deque()
        self._wanted: frozenset[Dead] = frozenset()
        self._ready: dict[Dead, PlanAssignment] = {}
        self._most_ready = _MOST_ANSWERS
        self._planning: _Planning | None = None
        self._is_loaded = self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="plans ahead", daemon=True)
        self._thread.start()
        # Before multiprocessing ends our process itself at exit, which would look like a death and have another one started.
        atexit.register(self.close)

    def __enter__(self) -> "PlanPrefetch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def has_answers(self) -> bool:
        """Whether a question was answered already: the next ones are answered without a planner having to be loaded."""
        return self._is_loaded

    @property
    def num_ready(self) -> int:
        """How many of the answers that were to be prepared are there."""
        with self._changed:
            return sum(question in self._ready for question in self._wanted)

    def prepare(self, failed: Dead, shape: Shape) -> None:
        """Have answers made for whatever may follow upon `failed`; what was to be prepared before is dropped."""
        num_ops = 3 * shape.num_stages * shape.num_chains
        most = max(1, min(_MOST_ANSWERS, _MOST_OPS // num_ops))
        questions = likely_failures(failed, shape)[:most]
        with self._changed:
            self._most_ready, self._wanted = most, frozenset(questions)
            self._waiting = deque(questions)
            self._forget()
            self._changed.notify_all()

    def answer(self, failed: Dead) -> PlanAssignment:
        """Return the answer at once if it is ready; else it is the next to be made, and waited for."""
        with self._changed:
            if failed in self._ready:
                return self._ready[failed]
            if self._is_closed:
                raise CancelledError("no plans are made any more")
            coming = self._urgent.setdefault(failed, Future())
            self._changed.notify_all()
        return coming.result()

    def close(self) -> None:
        """End the planning process at once; who waits for an answer hears that there is none."""
        with self._changed:
            self._is_closed = True
            if self._planning is not None:
                self._planning.kill()
            unanswered, self._urgent = self._urgent, {}
            self._changed.notify_all()
        for coming in unanswered.values():
            coming.cancel()
        self._thread.join()
        atexit.unregister(self.close)

    # What follows runs in our own thread.

    def _work(self) -> None:
        try:
            while (question := self._next()) is not None:
                self._settle(question, self._outcome(question))
        finally:
            self._drop()

    def _next(self) -> Dead | None:
        """Wait for a question, the urgent ones first; None when closed."""
        with self._changed:
            while not self._is_closed:
                if self._urgent:
                    return next(iter(self._urgent))
                while self._waiting:
                    question = self._waiting.popleft()
                    if question not in self._ready:
                        return question
                self._changed.wait()
            return None

    def _outcome(self, question: Dead) -> PlanAssignment | Exception | None:
        """What became of the question: the planning process is asked, or this one where that dies of it and somebody waits."""
        for _ in range(_MOST_PROCESSES):
            try:
                return self._running().ask(question)
            except (EOFError, OSError):
                self._drop()
            except Exception as problem:  # closed meanwhile, or something that cannot be pickled
                self._drop()
                return problem
        with self._changed:
            is_pressing = question in self._urgent
        return outcome_of(self._source, question) if is_pressing else None

    def _running(self) -> "_Planning":
        """The planning process, started if there is none."""
        if self._planning is not None:
            return self._planning
        started = _Planning(self._context)
        with self._changed:
            self._planning = started
            if self._is_closed:
                raise CancelledError("no plans are made any more")
        started.tell(self._source)
        return started

    def _drop(self) -> None:
        """End the planning process, if there is one, and leave nothing of it."""
        with self._changed:
            planning, self._planning = self._planning, None
        if planning is not None:
            planning.end()

    def _settle(self, question: Dead, outcome: PlanAssignment | Exception | None) -> None:
        """Keep an answer, and hand it to who waits. What went wrong is not kept: asked again, it may go right."""
        self._is_loaded = True
        if outcome is None:
            return
        with self._changed:
            coming = self._urgent.pop(question, None)
            if isinstance(outcome, PlanAssignment):
                self._ready[question] = outcome
                self._forget()
        if coming is None:
            return
        if isinstance(outcome, PlanAssignment):
            coming.set_result(outcome)
        else:
            coming.set_exception(outcome)

    def _forget(self) -> None:
        """Drop the oldest answers that are too many, those first that are not wanted."""
        num = len(self._ready) - self._most_ready
        unwanted = [question for question in self._ready if question not in self._wanted]
        for question in unwanted[: max(0, num)]:
            del self._ready[question]


class _Planning:
    """The process that plans, and the pipe to it. Only `kill` may be called by another thread than the one that owns it."""

    def __init__(self, context: SpawnContext | ForkServerContext) -> None:
        self._pipe, theirs = context.Pipe()
        try:
            self._process = context.Process(target=_serve, args=(theirs,), name="plans ahead", daemon=True)
            with children_uninterrupted():
                self._process.start()
        except BaseException:
            self._pipe.close()
            raise
        finally:
            theirs.close()

    def tell(self, source: PlanSource) -> None:
        self._pipe.send(source)

    def ask(self, question: Dead) -> PlanAssignment | Exception:
        """Return what became of the question; raises EOFError or OSError if the process is dead."""
        self._pipe.send(question)
        outcome = self._pipe.recv()
        assert isinstance(outcome, PlanAssignment | Exception)
        return outcome

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()


def _serve(pipe: "Connection[Any, Any]") -> None:
    """Answer questions until nobody asks any more: the first one at full speed, the others whenever nobody else computes.

    Until the first answer a planner is imported and its compiler warmed, seconds in which no failure could be answered; beside
    busy workers it would be minutes at the lowest priority.
    """
    end_with_parent()
    with suppress(EOFError, OSError):
        # Not an argument of the process: those are unpickled, and planners imported, before it watches its parent.
        source = pipe.recv()
        pipe.send(outcome_of(source, pipe.recv()))
        os.nice(19)
        while True:
            pipe.send(outcome_of(source, pipe.recv()))


def outcome_of(source: PlanSource, question: Dead) -> PlanAssignment | Exception:
    """The answer, or what the source raised instead."""
    try:
        return source.answer(question)
    except Exception as problem:
        return problem
