"""`PlanningProcess`, which makes plans beside the coordinator, and the texts that workers and the journal need of them."""

import os
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from typing import Any

from recycle.control.planning.kept_plans import CompressedAssignment, PlanRequest, pack_if_large
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import LayerMovingSource, PlanAssignment, PlanSource, SpeedAwareSource
from recycle.core.plans.steady_period import steady_period_us
from recycle.host.process_lifetime import children_uninterrupted, close_inherited_files, end_with_parent
from recycle.host.process_title import set_title


class PlanningProcess:
    """The planning process and the pipe to it. Only `kill` may be called by another thread than the owner.

    A process that has no other thread yet may give a context that forks, and so share the modules that it has loaded.
    """

    def __init__(self, context: SpawnContext | ForkContext) -> None:
        self._pipe, theirs = context.Pipe()
        try:
            self._process = context.Process(target=_serve, args=(theirs,), name="plan prefetch", daemon=True)
            with children_uninterrupted():
                self._process.start()
        except BaseException:
            self._pipe.close()
            raise
        finally:
            theirs.close()

    def send_source(self, source: PlanSource) -> None:
        self._pipe.send(source)

    def plan(self, request: PlanRequest) -> PlanAssignment | CompressedAssignment | Exception:
        """Return the plan, or the error of the source; raises EOFError or OSError if the process is dead."""
        self._pipe.send(request)
        outcome = self._pipe.recv()
        assert isinstance(outcome, PlanAssignment | CompressedAssignment | Exception)
        return outcome

    def periods_us(self, plans: Sequence[Plan]) -> list[int]:
        """Return the steady period of each plan; raises EOFError or OSError if the process is dead."""
        self._pipe.send(list(plans))
        periods_us: list[int] = self._pipe.recv()
        return periods_us

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()


def _serve(pipe: "Connection[Any, Any]") -> None:
    """Plan until the pipe closes: the first plan at normal priority, the others at the lowest.

    Before the first plan the planner is imported and its compiler warmed up: seconds in which no failure can be answered, and
    minutes at the lowest priority beside busy workers.
    """
    # A forked process has the coordinator's sockets and pipes: the others must see them close when the coordinator dies.
    close_inherited_files(keep=pipe.fileno())
    set_title("recycle planner")
    end_with_parent()
    with suppress(EOFError, OSError):
        # Not an argument of the process: those are unpickled, and planners imported, before it watches its parent.
        source = pipe.recv()
        pipe.send(_answer(source, pipe.recv()))
        os.nice(19)
        while True:
            pipe.send(_answer(source, pipe.recv()))


def _answer(source: PlanSource, asked: PlanRequest | list[Plan]) -> Any:
    if isinstance(asked, PlanRequest):
        return _packed(plan_or_error(source, asked))
    return [steady_period_us(plan) for plan in asked]


def plan_or_error(source: PlanSource, request: PlanRequest) -> PlanAssignment | Exception:
    """The plan for a request, with its texts. A source that knows no speeds plans as if all were equal."""
    try:
        if request.speeds is not None and isinstance(source, SpeedAwareSource):
            source = source.at_speeds(request.speeds)
        if request.layers is not None and isinstance(source, LayerMovingSource):
            source = source.at_layers(request.layers)
        return source.answer(request.failed).with_texts()
    except Exception as problem:
        return problem


def _packed(outcome: PlanAssignment | Exception) -> PlanAssignment | CompressedAssignment | Exception:
    return outcome if isinstance(outcome, Exception) else pack_if_large(outcome)
