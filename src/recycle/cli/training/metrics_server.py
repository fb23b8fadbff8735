"""A page for Prometheus: what a run has told so far, at http://127.0.0.1:PORT/metrics while it runs."""

import errno
import socketserver
import sys
import threading
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from recycle.core.errors import PortInUse, UserError
from recycle.report.export.prometheus import CONTENT_TYPE, Gauges

_HOST, _PATH = "127.0.0.1", "/metrics"
_POLL_S = 0.1


class MetricsServer:
    """Answers requests from a thread of its own, from when it is entered until it is left. Port 0 is any free one."""

    def __init__(self, port: int, gauges: Gauges) -> None:
        assert 0 <= port <= 65535
        self._wanted, self._gauges = port, gauges
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "MetricsServer":
        self._server = _listen(self._wanted, self._gauges)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        assert self._server is not None
        assert self._thread is not None
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        assert self._server is not None, "a server has a port once it is entered"
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.port}{_PATH}"


def _listen(port: int, gauges: Gauges) -> "_Server":
    try:
        return _Server((_HOST, port), partial(_Answer, gauges))
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} is in use by another program: choose another one with --metrics-port, or 0 to do without metrics"
            ) from None
        raise UserError(
            f"cannot listen on port {port} ({problem.strerror}): choose one of 1024 to 65535 with --metrics-port, "
            "or 0 to do without metrics"
        ) from None


class _Server(ThreadingHTTPServer):
    def server_bind(self) -> None:
        # Not that of HTTPServer, which asks the network for the name of this machine, and may wait long for it.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = _HOST, int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Someone who hangs up before the answer is no news; a mistake of ours is.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Answer(BaseHTTPRequestHandler):
    """The answer to one request."""

    timeout = 10  # seconds for which somebody may be silent

    def __init__(self, gauges: Gauges, *about: Any) -> None:
        self._gauges = gauges  # before super(), which answers at once
        super().__init__(*about)

    def do_GET(self) -> None:
        if self.path.partition("?")[0] == _PATH:
            self._send(HTTPStatus.OK, CONTENT_TYPE, self._gauges.text())
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", f"there is only {_PATH} here\n")

    def _send(self, status: HTTPStatus, content_type: str, text: str) -> None:
        body = text.encode("utf-8")
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        """Say nothing: the terminal belongs to the training."""
