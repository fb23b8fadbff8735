"""The page for Prometheus: real requests to a real port."""

import socket
import sys
import threading
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from recycle.cli.training.metrics_server import MetricsServer
from recycle.core.errors import PortInUse, UserError
from recycle.core.events.record import Stepped
from recycle.report.export.prometheus import Gauges

pytestmark = pytest.mark.timeout(60)
WAIT_S = 20


def step(iteration: int) -> Stepped:
    return Stepped(iteration, iteration * 1000, 5.5, 1.0, 1.0)


def page(url: str) -> str:
    with urlopen(url, timeout=WAIT_S) as answer:
        return str(answer.read().decode("utf-8"))


def test_the_page_is_what_the_gauges_say_at_that_moment() -> None:
    gauges = Gauges()
    with MetricsServer(0, gauges) as server:
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"
        assert "recycle_step" not in page(server.url)
        gauges.hear(step(6))
        assert "\nrecycle_step 7\n" in page(server.url)
        assert page(f"{server.url}?from=here") == gauges.text()


def test_the_answer_says_that_it_is_prometheus_text_and_how_long() -> None:
    gauges = Gauges()
    with MetricsServer(0, gauges) as server, urlopen(server.url, timeout=WAIT_S) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert int(answer.headers["Content-Length"]) == len(gauges.text().encode())


@pytest.mark.parametrize("path", ["", "/", "/metric", "/metrics/", "/metrics/a", "/../metrics"])
def test_any_other_page_is_not_found(path: str) -> None:
    with MetricsServer(0, Gauges()) as server:
        with pytest.raises(HTTPError) as caught:
            urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=WAIT_S)
        with caught.value:
            assert (caught.value.code, caught.value.read()) == (404, b"there is only /metrics here\n")


def test_nobody_can_send_anything() -> None:
    with MetricsServer(0, Gauges()) as server:
        with pytest.raises(HTTPError) as caught:
            urlopen(Request(server.url, data=b"recycle_step 1"), timeout=WAIT_S)
        with caught.value:
            assert caught.value.code == 501


def test_a_taken_port_is_refused_in_one_sentence_that_names_it() -> None:
    with MetricsServer(0, Gauges()) as server:
        with pytest.raises(PortInUse) as caught, MetricsServer(server.port, Gauges()):
            pass
        assert str(caught.value) == (
            f"port {server.port} is in use by another program: choose another one with --metrics-port, or 0 to do without metrics"
        )
        assert page(server.url) == Gauges().text()


def test_a_port_that_only_the_system_may_open_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("socketserver.TCPServer.server_bind", bind)
    with pytest.raises(UserError, match=r"^cannot listen on port 80 \(Permission denied\): choose one of 1024 to 65535"):
        MetricsServer(80, Gauges()).__enter__()


def test_the_port_is_free_again_and_the_thread_gone_when_it_is_left() -> None:
    with MetricsServer(0, Gauges()) as first:
        port = first.port
        page(first.url)
        assert "metrics" in {thread.name for thread in threading.enumerate()}
    assert "metrics" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(URLError):
        urlopen(first.url, timeout=WAIT_S)
    with MetricsServer(port, Gauges()) as second:
        assert second.port == port
        assert page(second.url) == Gauges().text()


def test_a_run_that_fails_leaves_no_server_behind() -> None:
    with pytest.raises(ZeroDivisionError), MetricsServer(0, Gauges()) as server:
        raise ZeroDivisionError
    with pytest.raises(URLError):
        urlopen(server.url, timeout=WAIT_S)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.2 is not an address of this machine")
def test_only_this_machine_is_answered() -> None:
    with MetricsServer(0, Gauges()) as server, pytest.raises(OSError, match="refused"):
        # Another address of this machine: a server on all addresses would answer it.
        socket.create_connection(("127.0.0.2", server.port), timeout=WAIT_S)


def test_it_is_quiet_whoever_asks_and_whoever_hangs_up(capfd: pytest.CaptureFixture[str]) -> None:
    with MetricsServer(0, Gauges()) as server:
        page(server.url)
        with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as client:
            client.sendall(b"nonsense\r\n\r\n")
            assert b"400" in client.recv(1000)
        hang_up(server.port)
        page(server.url)
    assert capfd.readouterr() == ("", "")


def hang_up(port: int) -> None:
    """Ask, and be gone before the answer: the connection is reset, not closed."""
    client = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    client.sendall(b"GET /metrics HTTP/1.0\r\n")
    client.close()


def test_someone_silent_keeps_nobody_else_waiting_nor_the_end() -> None:
    with MetricsServer(0, Gauges()) as server, socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S):
        assert page(server.url) == Gauges().text()


def test_pages_are_whole_while_events_come_in() -> None:
    gauges = Gauges()
    with MetricsServer(0, gauges) as server:
        hearing = threading.Thread(target=lambda: [gauges.hear(step(number)) for number in range(20_000)])
        hearing.start()
        seen = [page(server.url) for _ in range(20)]
        hearing.join(WAIT_S)
        assert not hearing.is_alive()
        assert "\nrecycle_step 20000\n" in page(server.url)
    steps = [int(text.partition("\nrecycle_step ")[2].partition("\n")[0] or 0) for text in seen]
    assert steps == sorted(steps)
    assert all(text.endswith("\n") for text in seen)
