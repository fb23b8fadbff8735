"""`shown_run`: what follows a run of `recycle.train`: the live view or lines of JSON, the page, Prometheus, OpenTelemetry."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from recycle.core.errors import UserError
from recycle.core.plans.carried_layers import carried_by_stage
from recycle.runtime.job import Job
from recycle.runtime.launch.local_launcher import Watch


@dataclass(frozen=True, slots=True)
class ShownRun:
    """What follows a run: observers by their names, what prints a warning, and the pipe on which failures are asked for."""

    observers: dict[str, Watch]
    warn: Callable[[str], None]
    injections: "Connection[Any, Any] | None" = None


def refuse_unshowable(job: Job) -> None:
    """Raise if a page is asked for that would have nothing to show, or whose address nobody would learn."""
    show = job.options.show
    if job.options.quiet and (show.dashboard is not None or show.json_lines):
        raise UserError(
            "quiet prints nothing, neither the address of the page nor JSON lines: leave it out, or dashboard and json_lines"
        )
    if job.options.show.dashboard is not None and job.out is None:
        raise UserError("dashboard shows what a run records: name a folder with out")


@contextmanager
def shown_run(job: Job, folder: Path | None) -> Iterator[ShownRun]:
    """Show a run until the block ends, as `recycle train` does, by the same code."""
    show, observers, injections = job.options.show, dict[str, Watch](), None
    with ExitStack() as stack:
        say = _view(job, stack, observers)
        if folder is not None:
            say(f"the run is recorded in {folder}: recycle report {folder} shows it")
        if show.dashboard is not None and folder is not None:
            from recycle.cli.live.page_process import PageRequest, page_of_run

            token_file = None if show.dashboard_token_file is None else Path(show.dashboard_token_file)
            where = show.dashboard, show.dashboard_host, token_file
            request = PageRequest(*where, show.allow_injection, tuple(show.dashboard_names))
            page = stack.enter_context(page_of_run(request, folder))
            say(page.sentence)
            injections = page.injections
        if show.metrics_port:
            from recycle.cli.training.metrics_server import RunCollector, metrics_url, serve_metrics

            collector = RunCollector()
            port = stack.enter_context(serve_metrics(show.metrics_port, collector, show.metrics_host))
            say(f"metrics for Prometheus at {metrics_url(port, show.metrics_host)}")
            observers["the server for Prometheus"] = collector.on_event
        if show.otlp:
            from recycle.cli.training.otlp import OtlpExporter

            observers["the exporter to OpenTelemetry"] = stack.enter_context(closing(OtlpExporter(show.otlp, say))).on_event
        yield ShownRun(observers, lambda sentence: say(f"warning: {sentence}"), injections)


def _view(job: Job, stack: ExitStack, observers: dict[str, Watch]) -> Callable[[str], None]:
    """Add what prints the progress of a job to its observers; return what prints a sentence."""
    if job.options.quiet:
        return lambda sentence: None
    if job.options.show.json_lines:
        from recycle.cli.live.json_lines import JsonLines

        lines = JsonLines(sys.stderr)
        observers["the printer of JSON lines"] = lines.observe
        return lines.say
    from recycle.cli.live.live_view import LiveView

    cluster = job.first_plan.problem.cluster
    view = stack.enter_context(LiveView(job.steps, cluster.shape, cluster.failed, carried=carried_by_stage(job.first_plan)))
    observers["the live view"] = view.observe
    return view.say
