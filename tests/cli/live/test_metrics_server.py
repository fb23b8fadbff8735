"""The metrics of a run for Prometheus: their text, and real requests to a real port."""

import json
import math
import re
import socket
import sys
import threading
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from recycle.cli.live.metrics_server import RunCollector, metrics_url, serve_metrics
from recycle.core.errors import PortInUse, UserError
from recycle.core.events.record import Event, Held, LinkChanged, SpeedChanged, Spell, Stepped
from recycle.core.release import RELEASE
from tests.report.record.test_live_facts import RUN

pytestmark = pytest.mark.timeout(60)
WAIT_S = 20
SECOND = 1_000_000
TEXT_OF_RUN = f"""\
# HELP recycle_build_info The release of ReCycle.
# TYPE recycle_build_info gauge
recycle_build_info{{version="{RELEASE}"}} 1.0
# HELP recycle_step Steps done since the run first began.
# TYPE recycle_step gauge
recycle_step 3.0
# HELP recycle_loss Mean loss of the last step; NaN if it is not finite.
# TYPE recycle_loss gauge
recycle_loss 4.75
# HELP recycle_gradient_norm Global norm of the last gradient; NaN if it is not finite.
# TYPE recycle_gradient_norm gauge
recycle_gradient_norm 0.5
# HELP recycle_samples_total Samples applied for good.
# TYPE recycle_samples_total counter
recycle_samples_total 108.0
# HELP recycle_discarded_samples_total Samples worked on in vain.
# TYPE recycle_discarded_samples_total counter
recycle_discarded_samples_total 7.0
# HELP recycle_samples_per_second Throughput of the last spell of training.
# TYPE recycle_samples_per_second gauge
recycle_samples_per_second 36.0
# HELP recycle_iteration_seconds Time between the ends of the last two steps, pauses included.
# TYPE recycle_iteration_seconds gauge
recycle_iteration_seconds 2.5
# HELP recycle_live_workers Workers that are alive.
# TYPE recycle_live_workers gauge
recycle_live_workers 11.0
# HELP recycle_worker_up Whether a worker is alive.
# TYPE recycle_worker_up gauge
recycle_worker_up{{host="",stage="2",worker="W1_2"}} 0.0
recycle_worker_up{{host="node1",stage="0",worker="W0_0"}} 1.0
# HELP recycle_recoveries_total Times that training went on after workers left or joined.
# TYPE recycle_recoveries_total counter
recycle_recoveries_total 0.0
# HELP recycle_lost_seconds_total Time lost to recoveries, by what it was lost to.
# TYPE recycle_lost_seconds_total counter
recycle_lost_seconds_total{{part="detect"}} 0.0
recycle_lost_seconds_total{{part="abort"}} 0.0
recycle_lost_seconds_total{{part="plan"}} 0.0
recycle_lost_seconds_total{{part="regroup"}} 0.0
recycle_lost_seconds_total{{part="transfer"}} 0.0
recycle_lost_seconds_total{{part="redo"}} 0.0
# HELP recycle_skipped_steps_total Steps that changed nothing, because their gradient was not finite.
# TYPE recycle_skipped_steps_total counter
recycle_skipped_steps_total 1.0
# HELP recycle_checkpoint_step Steps in the newest checkpoint.
# TYPE recycle_checkpoint_step gauge
recycle_checkpoint_step 2.0
# HELP recycle_checkpoint_bytes Size of the newest checkpoint.
# TYPE recycle_checkpoint_bytes gauge
recycle_checkpoint_bytes 123456.0
# HELP recycle_warnings_total Warnings.
# TYPE recycle_warnings_total counter
recycle_warnings_total 1.0
# HELP recycle_state_seconds_total Time spent training, in redoing, checkpoints, pauses and down.
# TYPE recycle_state_seconds_total counter
recycle_state_seconds_total{{state="train"}} 3.5
recycle_state_seconds_total{{state="pause"}} 0.5
recycle_state_seconds_total{{state="redo"}} 1.0
# HELP recycle_worker_memory_bytes Most that the process of a worker held.
# TYPE recycle_worker_memory_bytes gauge
recycle_worker_memory_bytes{{host="node1",stage="0",worker="W0_0"}} 1500.0
recycle_worker_memory_bytes{{host="",stage="1",worker="W0_1"}} 2000.0
# HELP recycle_worker_activation_bytes Most that the activations of a worker took.
# TYPE recycle_worker_activation_bytes gauge
recycle_worker_activation_bytes{{host="node1",stage="0",worker="W0_0"}} 600.0
recycle_worker_activation_bytes{{host="",stage="1",worker="W0_1"}} 700.0
# HELP recycle_worker_planned_activation_bytes Most that they take by the plan's memory model.
# TYPE recycle_worker_planned_activation_bytes gauge
recycle_worker_planned_activation_bytes{{host="node1",stage="0",worker="W0_0"}} 500.0
recycle_worker_planned_activation_bytes{{host="",stage="1",worker="W0_1"}} 650.0
"""


def collector_of(events: list[Event]) -> RunCollector:
    collector = RunCollector()
    for event in events:
        collector.on_event(event)
    return collector


def text(collector: RunCollector) -> str:
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


def samples(events: list[Event]) -> dict[str, dict[str, float]]:
    """The values of every metric by their label, "" without one, as the library's parser reads them."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text(collector_of(events))):
        for sample in family.samples:
            label = sample.labels.get("worker", "".join(sample.labels.values()))
            found.setdefault(sample.name, {})[label] = sample.value
    return found


def test_the_metrics_of_a_run_have_names_labels_and_help() -> None:
    assert text(collector_of(RUN)) == TEXT_OF_RUN


def test_a_metric_without_a_value_is_left_out() -> None:
    counters = {"samples_total", "discarded_samples_total", "recoveries_total", "skipped_steps_total", "warnings_total"}
    nothing = samples([])
    assert nothing.pop("recycle_lost_seconds_total") == dict.fromkeys(
        ("detect", "abort", "plan", "regroup", "transfer", "redo"), 0
    )
    assert nothing.pop("recycle_build_info") == {RELEASE: 1}
    assert nothing == {f"recycle_{name}": {"": 0} for name in counters}


def test_a_loss_that_is_not_finite_is_nan() -> None:
    run = samples([*RUN[:3], Stepped(1, 3 * SECOND, None, None, None)])
    assert math.isnan(run["recycle_loss"][""])
    assert math.isnan(run["recycle_gradient_norm"][""])
    assert (run["recycle_step"], run["recycle_skipped_steps_total"]) == ({"": 2}, {"": 1})


@given(name=st.text(), loss=st.floats(), size=st.integers(0, 2**70))
def test_any_name_and_any_number_can_be_read_back(name: str, loss: float, size: int) -> None:
    run = samples([Stepped(0, 0, loss, loss, 1.0), Held(name, size, 0, 0), Spell(0, 1, name)])
    assert run["recycle_loss"][""] == pytest.approx(loss, nan_ok=True, abs=0, rel=0)
    assert run["recycle_worker_memory_bytes"] == {name: float(size)}
    assert run["recycle_state_seconds_total"] == {name: 1e-6}


def step(iteration: int) -> Stepped:
    return Stepped(iteration, iteration * 1000, 5.5, 1.0, 1.0)


def page(url: str) -> str:
    with urlopen(url, timeout=WAIT_S) as answer:
        return str(answer.read().decode("utf-8"))


def test_the_page_has_the_metrics_of_that_moment() -> None:
    collector = RunCollector()
    with serve_metrics(0, collector) as port:
        assert metrics_url(port) == f"http://127.0.0.1:{port}/metrics"
        assert "recycle_step" not in page(metrics_url(port))
        collector.on_event(step(6))
        assert "\nrecycle_step 7.0\n" in page(metrics_url(port))
        assert page(f"{metrics_url(port)}?from=here") == text(collector)


def test_the_answer_says_that_it_is_prometheus_text_and_how_long() -> None:
    collector = RunCollector()
    with serve_metrics(0, collector) as port, urlopen(metrics_url(port), timeout=WAIT_S) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert int(answer.headers["Content-Length"]) == len(text(collector).encode())


@pytest.mark.parametrize("path", ["", "/", "/metric", "/metrics/", "/metrics/a", "/../metrics"])
def test_every_path_answers_with_the_metrics(path: str) -> None:
    with serve_metrics(0, RunCollector()) as port:
        assert page(f"http://127.0.0.1:{port}{path}") == text(RunCollector())


def test_a_page_for_the_browser_s_icon_is_empty() -> None:
    with serve_metrics(0, RunCollector()) as port:
        assert page(f"http://127.0.0.1:{port}/favicon.ico") == ""


def test_nobody_can_send_anything() -> None:
    with serve_metrics(0, RunCollector()) as port:
        with pytest.raises(HTTPError) as caught:
            urlopen(Request(metrics_url(port), data=b"recycle_step 1"), timeout=WAIT_S)
        with caught.value:
            assert caught.value.code == 405


def test_a_taken_port_is_refused_in_one_sentence_that_names_it() -> None:
    with serve_metrics(0, RunCollector()) as port:
        with pytest.raises(PortInUse) as caught, serve_metrics(port, RunCollector()):
            pass
        assert str(caught.value) == (
            f"port {port} is in use by another program: choose another one with --metrics-port, or 0 to do without metrics"
        )
        assert page(metrics_url(port)) == text(RunCollector())


def test_a_port_that_only_the_system_may_open_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("socketserver.TCPServer.server_bind", bind)
    with pytest.raises(UserError, match=r"^cannot listen on port 80 \(Permission denied\): choose one of 1024 to 65535"):
        serve_metrics(80, RunCollector()).__enter__()


def test_the_port_is_free_again_and_the_thread_gone_when_it_is_left() -> None:
    before = set(threading.enumerate())
    with serve_metrics(0, RunCollector()) as port:
        page(metrics_url(port))
        assert set(threading.enumerate()) > before
    assert set(threading.enumerate()) == before
    with pytest.raises(URLError):
        urlopen(metrics_url(port), timeout=WAIT_S)
    with serve_metrics(port, RunCollector()) as second:
        assert second == port
        assert page(metrics_url(second)) == text(RunCollector())


def test_a_run_that_fails_leaves_no_server_behind() -> None:
    with pytest.raises(ZeroDivisionError), serve_metrics(0, RunCollector()) as port:
        raise ZeroDivisionError
    with pytest.raises(URLError):
        urlopen(metrics_url(port), timeout=WAIT_S)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.2 is not an address of this machine")
def test_only_this_machine_is_answered() -> None:
    with serve_metrics(0, RunCollector()) as port, pytest.raises(OSError, match="refused"):
        # Another address of this machine: a server on all addresses would answer it.
        socket.create_connection(("127.0.0.2", port), timeout=WAIT_S)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.2 is not an address of this machine")
def test_another_machine_is_answered_at_the_address_that_is_given() -> None:
    with serve_metrics(0, collector_of(RUN), "0.0.0.0") as port:
        assert page(metrics_url(port, "127.0.0.2")) == TEXT_OF_RUN


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(UserError, match=f"{host} is no address of this machine"), serve_metrics(0, RunCollector(), host):
        pass


def test_every_metric_of_the_dashboard_exists() -> None:
    dashboard = json.loads((Path(__file__).parents[3] / "docs" / "grafana" / "recycle.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 8
    used = set(re.findall(r"recycle_\w+", " ".join(queries)))
    assert used <= set(samples(RUN))
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_it_is_quiet_whoever_asks_and_whoever_hangs_up(capfd: pytest.CaptureFixture[str]) -> None:
    with serve_metrics(0, RunCollector()) as port:
        page(metrics_url(port))
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client:
            client.sendall(b"nonsense\r\n\r\n")
            assert b"400" in client.recv(1000)
        hang_up(port)
        page(metrics_url(port))
    assert capfd.readouterr() == ("", "")


def hang_up(port: int) -> None:
    """Ask, and be gone before the answer: the connection is reset, not closed."""
    client = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    client.sendall(b"GET /metrics HTTP/1.0\r\n")
    client.close()


def test_someone_silent_keeps_nobody_else_waiting_nor_the_end() -> None:
    with serve_metrics(0, RunCollector()) as port, socket.create_connection(("127.0.0.1", port), timeout=WAIT_S):
        assert page(metrics_url(port)) == text(RunCollector())


def test_pages_are_whole_while_events_come_in() -> None:
    collector = RunCollector()
    with serve_metrics(0, collector) as port:
        feeding = threading.Thread(target=lambda: [collector.on_event(step(number)) for number in range(20_000)])
        feeding.start()
        seen = [page(metrics_url(port)) for _ in range(20)]
        feeding.join(WAIT_S)
        assert not feeding.is_alive()
        assert "\nrecycle_step 20000.0\n" in page(metrics_url(port))
    steps = [float(body.partition("\nrecycle_step ")[2].partition("\n")[0] or 0) for body in seen]
    assert steps == sorted(steps)
    assert all(body.endswith("\n") for body in seen)


def test_the_speed_of_a_slow_worker_is_a_metric() -> None:
    collector = RunCollector()
    collector.on_event(SpeedChanged(5, "W1_2", 0.6, 4))
    (speed,) = [metric for metric in collector.collect() if metric.name == "recycle_worker_speed"]
    assert [(sample.labels["worker"], sample.value) for sample in speed.samples] == [("W1_2", 0.6)]


def test_the_speed_and_the_delay_of_a_slow_link_are_metrics() -> None:
    collector = RunCollector()
    assert not [metric for metric in collector.collect() if metric.name.startswith("recycle_link")]
    collector.on_event(LinkChanged(5, "W1_1-W1_2", 0.05, 4, 20_000, 1_000))
    found = {metric.name: metric.samples for metric in collector.collect()}
    assert [(one.labels, one.value) for one in found["recycle_link_speed"]] == [({"link": "W1_1-W1_2"}, 0.05)]
    assert [(one.labels, one.value) for one in found["recycle_link_delay_seconds"]] == [({"link": "W1_1-W1_2"}, 0.02)]
