"""`OtlpExporter`: the metrics of a run, and spans of its epochs and recoveries, for an OpenTelemetry collector.

It sends what Prometheus would read, as JSON over HTTP (OTLP/HTTP), with the standard library: the encoding is small and stable.
"""

import http.client
import json
import math
import secrets
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.core import Metric

from recycle.cli.live.metrics_server import RunCollector
from recycle.core.errors import UserError
from recycle.core.events.record import Event, Recovered
from recycle.core.release import RELEASE

_EVERY_S, _TIMEOUT_S = 10.0, 5.0
# Spans that no collector takes are kept up to so many, the newest ones.
_MOST_SPANS = 1000
_CUMULATIVE, _INTERNAL = 2, 1
_PARTS = ("detect_us", "abort_us", "plan_us", "regroup_us", "transfer_us", "redo_us")


class OtlpExporter:
    """Sends to the collector at `url` every ten seconds and at the end. One that is away disturbs nothing, and is named once.

    One thread calls `on_event`; `close` sends the last values. Raises UserError if the URL is none.
    """

    def __init__(self, url: str, say: Callable[[str], None], every_s: float = _EVERY_S) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{url!r} is no address of a collector: write http://HOST:4318")
        self._url, self._say, self._every_s, self._is_told = url.rstrip("/"), say, every_s, False
        self._collector, self._spans = RunCollector(), deque[dict[str, Any]](maxlen=_MOST_SPANS)
        self._begin_ns, self._trace = time.time_ns(), secrets.token_hex(16)
        self._epoch, self._epoch_us, self._last_us = 1, 0, 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def on_event(self, event: Event) -> None:
        self._collector.on_event(event)
        if (at_us := getattr(event, "at_us", None)) is None:
            return
        # Events count from the beginning of the run, and come a little late: the earliest beginning is the nearest one.
        self._begin_ns = min(self._begin_ns, time.time_ns() - at_us * 1000)
        self._last_us = max(self._last_us, at_us)
        if isinstance(event, Recovered):
            self._end_epoch(event.at_us)
            facts = {"epoch": event.epoch, "cause": event.cause, "workers": ", ".join(event.workers), "joins": event.joins}
            facts |= {"live_workers": event.num_live, **{name: getattr(event, name) for name in _PARTS}}
            self._add_span("recovery", event.at_us, event.end_us, facts)
            self._epoch, self._epoch_us = event.epoch, event.end_us

    def close(self) -> None:
        self._end_epoch(self._last_us)
        self._closing.set()
        self._thread.join()

    def _end_epoch(self, at_us: int) -> None:
        self._add_span("epoch", self._epoch_us, max(at_us, self._epoch_us), {"epoch": self._epoch})

    def _add_span(self, name: str, begin_us: int, end_us: int, facts: Mapping[str, Any]) -> None:
        times = {"startTimeUnixNano": self._at_ns(begin_us), "endTimeUnixNano": self._at_ns(end_us)}
        ids = {"traceId": self._trace, "spanId": secrets.token_hex(8)}
        self._spans.append({**ids, "name": f"recycle.{name}", "kind": _INTERNAL, **times, "attributes": _attributes(facts)})

    def _at_ns(self, time_us: int) -> str:
        return str(self._begin_ns + time_us * 1000)

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            is_closing = self._closing.wait(self._every_s)
            spans = list(self._spans)
            try:
                metrics = [_metric(each, str(self._begin_ns), str(time.time_ns())) for each in self._collector.collect()]
                self._post("/v1/metrics", {"resourceMetrics": [{**_RESOURCE, "scopeMetrics": [{**_SCOPE, "metrics": metrics}]}]})
                if spans:
                    self._post("/v1/traces", {"resourceSpans": [{**_RESOURCE, "scopeSpans": [{**_SCOPE, "spans": spans}]}]})
            except (OSError, ValueError, http.client.HTTPException) as problem:
                if not self._is_told:
                    reason = getattr(problem, "reason", None) or problem
                    self._say(f"cannot send metrics to {self._url} ({reason}); it is tried again every {self._every_s:g} s")
                self._is_told = True
            else:
                self._is_told = False
                for _ in spans:
                    self._spans.popleft()

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        data = json.dumps(body, allow_nan=False).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            answer.read()


def _metric(family: Metric, begin_ns: str, now_ns: str) -> dict[str, Any]:
    points = [
        {"attributes": _attributes(sample.labels), "timeUnixNano": now_ns, "asDouble": _double(sample.value)}
        for sample in family.samples
    ]
    about = {"name": family.name, "description": family.documentation}
    if family.type != "counter":
        return {**about, "gauge": {"dataPoints": points}}
    points = [{"startTimeUnixNano": begin_ns, **point} for point in points]
    return {**about, "sum": {"dataPoints": points, "aggregationTemporality": _CUMULATIVE, "isMonotonic": True}}


def _double(value: float) -> float | str:
    """A number as the encoding has it: JSON knows no NaN."""
    return float(value) if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _attributes(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in facts.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": str(value)}


_RESOURCE = {"resource": {"attributes": _attributes({"service.name": "recycle", "service.version": RELEASE})}}
_SCOPE = {"scope": {"name": "recycle", "version": RELEASE}}
