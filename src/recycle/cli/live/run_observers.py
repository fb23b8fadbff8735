"""`observers_of_run`: a run's live view or lines of JSON, its page, and its exporters to Prometheus and OpenTelemetry."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recycle.cli.live.json_lines import JsonLines
from recycle.cli.live.live_view import LiveView
from recycle.cli.live.page_process import PageRequest, page_of_run
from recycle.core.events.record import Event
from recycle.core.plans.carried_layers import carried_by_stage
from recycle.core.plans.plan import Plan

if TYPE_CHECKING:
    from recycle.runtime.options import ShowOptions

_Observe = Callable[[Event], None]
_Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunObservers:
    """Observers by their names in warnings, what prints a sentence, and the pipe on which the page asks for failures."""

    observers: dict[str, _Observe]
    say: _Say
    injections: "Connection[Any, Any] | None" = None

    def warn(self, sentence: str) -> None:
        self.say(f"warning: {sentence}")


@contextmanager
def observers_of_run(
    show: "ShowOptions", plan: Plan, num_steps: int, folder: Path | None, is_quiet: bool = False
) -> Iterator[RunObservers]:
    """The observers of a run that begins with `plan`, until the block ends. The page shows what is in the run's `folder`."""
    observers, injections = dict[str, _Observe](), None
    with ExitStack() as stack:
        page = None
        if show.dashboard is not None and folder is not None:
            token_file = None if show.dashboard_token_file is None else Path(show.dashboard_token_file)
            where = show.dashboard, show.dashboard_host, token_file
            page = stack.enter_context(
                page_of_run(PageRequest(*where, show.allow_injection, tuple(show.dashboard_names)), folder)
            )
            injections = page.injections
        say = _say_nothing if is_quiet else _view(show, plan, num_steps, stack, observers)
        if page is not None:
            say(page.sentence)
        if show.metrics_port:
            from recycle.cli.live.metrics_server import RunCollector, metrics_url, serve_metrics

            collector = RunCollector()
            port = stack.enter_context(serve_metrics(show.metrics_port, collector, show.metrics_host))
            say(f"metrics for Prometheus at {metrics_url(port, show.metrics_host)}")
            observers["the server for Prometheus"] = collector.on_event
        if show.otlp:
            from recycle.cli.live.otlp import OtlpExporter

            observers["the exporter to OpenTelemetry"] = stack.enter_context(closing(OtlpExporter(show.otlp, say))).on_event
        yield RunObservers(observers, say, injections)


def _view(show: "ShowOptions", plan: Plan, num_steps: int, stack: ExitStack, observers: dict[str, _Observe]) -> _Say:
    """Add what prints the progress to the observers; return what prints a sentence."""
    if show.json_lines:
        lines = JsonLines(sys.stderr)
        observers["the printer of JSON lines"] = lines.observe
        return lines.say
    cluster = plan.problem.cluster
    view = stack.enter_context(LiveView(num_steps, cluster.shape, cluster.failed, carried=carried_by_stage(plan)))
    observers["the live view"] = view.observe
    return view.say


def _say_nothing(sentence: str) -> None:
    """The run is quiet."""
