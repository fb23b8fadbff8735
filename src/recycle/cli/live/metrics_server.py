"""`serve_metrics`: the metrics of a run for Prometheus, at http://HOST:PORT/metrics while it runs."""

import errno
import math
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from recycle.core.cluster import Worker
from recycle.core.errors import PortInUse, UserError
from recycle.core.events.record import Event, LinkChanged
from recycle.core.release import RELEASE
from recycle.report.record.live_facts import RunFacts, facts_after

_LOOPBACK = "127.0.0.1"
_LABELS = ("worker", "stage", "host")


class RunCollector(Collector):
    """Turns the events of a run into metrics. One thread may call `on_event`; any thread may call `collect`."""

    def __init__(self) -> None:
        self._facts = RunFacts()  # one reference, replaced whole: a reader never sees half an event

    def on_event(self, event: Event) -> None:
        self._facts = facts_after(self._facts, event)

    def collect(self) -> Iterable[Metric]:
        """Every metric with a known value."""
        return [metric for metric in _metrics(self._facts) if metric.samples]


@contextmanager
def serve_metrics(port: int, collector: RunCollector, host: str = _LOOPBACK) -> Iterator[int]:
    """Serve the metrics of a collector from a thread of its own; yields the port, which for port 0 is any free one.

    Raises UserError if that address and port cannot be listened on.
    """
    assert 0 <= port <= 65535
    registry = CollectorRegistry()
    registry.register(collector)
    server, thread = _listen(host, port, registry)
    server.handle_error = _ignore_closed_connection  # type: ignore[method-assign]
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def metrics_url(port: int, host: str = _LOOPBACK) -> str:
    """The address at which the metrics of a server that listens on `host` are found."""
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"


def _listen(host: str, port: int, registry: CollectorRegistry) -> tuple[WSGIServer, Thread]:
    try:
        return start_http_server(port, host, registry)
    except OSError as problem:
        if isinstance(problem, socket.gaierror) or problem.errno == errno.EADDRNOTAVAIL:
            raise UserError(
                f"{host} is no address of this machine: give one of its own with --metrics-host, or 0.0.0.0 for all of them"
            ) from None
        if problem.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} is in use by another program: choose another one with --metrics-port, or 0 to do without metrics"
            ) from None
        raise UserError(
            f"cannot listen on port {port} ({problem.strerror}): choose one of 1024 to 65535 with --metrics-port, "
            "or 0 to do without metrics"
        ) from None


def _ignore_closed_connection(request: object, client_address: object) -> None:
    """Handle an error of one request: print it, unless the client only closed the connection early."""
    if not isinstance(sys.exc_info()[1], OSError):
        traceback.print_exc()


def _metrics(facts: RunFacts) -> Iterator[Metric]:
    yield InfoMetricFamily("recycle_build", "The release of ReCycle.", {"version": RELEASE})
    if facts.step is not None:
        yield _gauge("step", "Steps done since the run first began.", facts.step.iteration + 1)
        yield _gauge("loss", "Mean loss of the last step; NaN if it is not finite.", _number(facts.step.loss))
        yield _gauge("gradient_norm", "Global norm of the last gradient; NaN if it is not finite.", _number(facts.step.norm))
    yield _counter("samples", "Samples applied for good.", facts.num_samples)
    yield _counter("discarded_samples", "Samples worked on in vain.", facts.num_discarded)
    yield _gauge("samples_per_second", "Throughput of the last spell of training.", facts.samples_per_s)
    took_s = None if facts.iteration_us is None else facts.iteration_us / 1e6
    yield _gauge("iteration_seconds", "Time between the ends of the last two steps, pauses included.", took_s)
    yield _gauge("live_workers", "Workers that are alive.", facts.num_live)
    yield _of_workers("up", "Whether a worker is alive.", facts, {name: float(is_up) for name, is_up in facts.is_up.items()})
    yield _of_workers("speed", "Speed of a worker whose ops are slower or faster than its peers' were.", facts, facts.speeds)
    yield _of_links("speed", "Speed of a link on which messages took longer than on others.", facts, lambda link: link.speed)
    yield _of_links("delay_seconds", "Time that a message takes on such a link.", facts, lambda link: link.time_us / 1e6)
    yield _counter("recoveries", "Times that training went on after workers left or joined.", facts.num_recoveries)
    yield _seconds_by("part", "lost_seconds", "Time lost to recoveries, by what it was lost to.", facts.lost_us)
    yield _counter("skipped_steps", "Steps that changed nothing, because their gradient was not finite.", facts.num_skipped)
    if facts.checkpoint is not None:
        yield _gauge("checkpoint_step", "Steps in the newest checkpoint.", facts.checkpoint.num_steps)
        yield _gauge("checkpoint_bytes", "Size of the newest checkpoint.", facts.checkpoint.size_bytes)
    yield _counter("warnings", "Warnings.", facts.num_warnings)
    yield _seconds_by("state", "state_seconds", "Time spent training, in redoing, checkpoints, pauses and down.", facts.state_us)
    held = facts.held
    peaks = {name: each.peak_bytes for name, each in held.items()}
    yield _of_workers("memory_bytes", "Most that the process of a worker held.", facts, peaks)
    activations = {name: each.activation_bytes for name, each in held.items()}
    yield _of_workers("activation_bytes", "Most that the activations of a worker took.", facts, activations)
    planned = {name: each.planned_bytes for name, each in held.items()}
    yield _of_workers("planned_activation_bytes", "Most that they take by the plan's memory model.", facts, planned)


def _gauge(name: str, about: str, value: float | None) -> Metric:
    return GaugeMetricFamily(f"recycle_{name}", about, value)


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(f"recycle_{name}", about, value)


def _seconds_by(label: str, name: str, about: str, times_us: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"recycle_{name}", about, labels=[label])
    for value, time_us in times_us.items():
        family.add_metric([value], time_us / 1e6)
    return family


def _of_workers(name: str, about: str, facts: RunFacts, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"recycle_worker_{name}", about, labels=_LABELS)
    for worker, value in values.items():
        family.add_metric([worker, _stage(worker), facts.hosts.get(worker, "")], value)
    return family


def _of_links(name: str, about: str, facts: RunFacts, value: Callable[[LinkChanged], float]) -> Metric:
    family = GaugeMetricFamily(f"recycle_link_{name}", about, labels=["link"])
    for link, known in facts.links.items():
        family.add_metric([link], value(known))
    return family


def _stage(worker: str) -> str:
    try:
        return str(Worker.parse(worker).stage)
    except UserError:
        return ""


def _number(value: float | None) -> float:
    return math.nan if value is None else value
