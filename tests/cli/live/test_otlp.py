"""A run's metrics and spans at a receiver of OTLP/HTTP: a real HTTP server, which keeps what it is sent."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from recycle.cli.live.otlp import OtlpExporter
from recycle.cli.main import main
from recycle.core.errors import UserError
from recycle.core.events.record import Recovered, Stepped
from tests.cli.machines.test_coordinator import free_port
from tests.processes import wait_for

pytestmark = pytest.mark.timeout(120)
EVENTS = (
    Stepped(0, 1_000_000, None, 1.0, 1.0),
    Recovered(
        2_000_000, 2_500_000, 2, ("W0_1",), False, "its connection closed", 1, detect_us=400_000, plan_us=100_000, num_live=3
    ),
    Stepped(1, 3_000_000, 0.5, 1.0, 1.0),
)


class Receiver:
    """A collector: the bodies of requests, by their paths. It refuses all while it is `away`."""

    def __init__(self) -> None:
        self.got: dict[str, list[Any]] = {"/v1/metrics": [], "/v1/traces": []}
        self.is_away = False
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/json"
                if not receiver.is_away:
                    receiver.got[self.path].append(json.loads(body))
                self.send_response(503 if receiver.is_away else 200)
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def metrics(self) -> dict[str, Any]:
        """The metrics of the last request, by their names."""
        (resource,) = self.got["/v1/metrics"][-1]["resourceMetrics"]
        (scope,) = resource["scopeMetrics"]
        return {metric["name"]: metric for metric in scope["metrics"]}

    def spans(self) -> list[dict[str, Any]]:
        return [span for body in self.got["/v1/traces"] for span in body["resourceSpans"][0]["scopeSpans"][0]["spans"]]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def facts_of(span: dict[str, Any]) -> dict[str, Any]:
    return {each["key"]: next(iter(each["value"].values())) for each in span["attributes"]}


def test_metrics_and_the_spans_of_epochs_and_recoveries_arrive(receiver: Receiver) -> None:
    said: list[str] = []
    exporter = OtlpExporter(receiver.url, said.append)
    for event in EVENTS:
        exporter.on_event(event)
    exporter.close()
    assert said == []
    found = receiver.metrics()
    assert [point["asDouble"] for point in found["recycle_step"]["gauge"]["dataPoints"]] == [2.0]
    assert found["recycle_recoveries"]["sum"]["isMonotonic"]
    parts = {
        point["attributes"][0]["value"]["stringValue"]: point for point in found["recycle_lost_seconds"]["sum"]["dataPoints"]
    }
    assert parts["detect"]["asDouble"] == 0.4
    first, recovery, last = receiver.spans()
    assert [span["name"] for span in (first, recovery, last)] == ["recycle.epoch", "recycle.recovery", "recycle.epoch"]
    took = [int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"]) for span in (first, recovery, last)]
    assert took == [2_000_000_000, 500_000_000, 500_000_000]
    assert abs(int(last["endTimeUnixNano"]) - time.time_ns()) < 60e9
    assert facts_of(recovery) | {"workers": "W0_1", "detect_us": "400000", "epoch": "2"} == facts_of(recovery)
    assert len({span["traceId"] for span in (first, recovery, last)}) == 1


def test_a_number_that_is_none_is_sent_as_the_encoding_has_it(receiver: Receiver) -> None:
    exporter = OtlpExporter(receiver.url, print)
    exporter.on_event(EVENTS[0])
    exporter.close()
    assert receiver.metrics()["recycle_loss"]["gauge"]["dataPoints"][0]["asDouble"] == "NaN"


def test_a_collector_that_is_away_is_named_once_and_gets_all_spans_later(receiver: Receiver) -> None:
    said: list[str] = []
    receiver.is_away = True
    exporter = OtlpExporter(receiver.url, said.append, every_s=0.05)
    for event in EVENTS:
        exporter.on_event(event)
    wait_for(lambda: bool(said))
    time.sleep(0.3)
    receiver.is_away = False
    exporter.close()
    assert said == [f"cannot send metrics to {receiver.url} (Service Unavailable); it is tried again every 0.05 s"]
    assert [span["name"] for span in receiver.spans()] == ["recycle.epoch", "recycle.recovery", "recycle.epoch"]


def test_nobody_waits_for_a_collector_that_is_not_there() -> None:
    said: list[str] = []
    exporter = OtlpExporter(f"http://127.0.0.1:{free_port()}", said.append)
    exporter.on_event(EVENTS[0])
    begin_s = time.monotonic()
    exporter.close()
    assert time.monotonic() < begin_s + 5
    assert "Connection refused" in said[0]


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://h:4317", "http://"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="is no address of a collector: write http://HOST:4318"):
        OtlpExporter(url, print)


def test_a_run_sends_its_metrics(receiver: Receiver, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pipelines", "1", "--stages", "2", "--microbatches", "2", "--steps", "3", "--otlp", receiver.url, "--json"]
    assert main(["train", *words]) == 0, capsys.readouterr().err
    (point,) = receiver.metrics()["recycle_step"]["gauge"]["dataPoints"]
    assert point["asDouble"] == 3.0
    (epoch,) = receiver.spans()
    assert facts_of(epoch) == {"epoch": "1"}
