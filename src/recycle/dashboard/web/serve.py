"""`serve_page`: the server as a process of its own, at a low priority, on this machine unless another address is asked for."""

import errno
import os
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import uvicorn

from recycle.core.errors import PortInUse, UserError
from recycle.dashboard.views.run_list import RunList
from recycle.dashboard.views.what_if import MakeSource
from recycle.dashboard.web.guard import Access
from recycle.dashboard.web.injection import Injector
from recycle.dashboard.web.kept_token import kept_token
from recycle.dashboard.web.patience import PatientProtocol
from recycle.dashboard.web.planners import Planners
from recycle.dashboard.web.routes import PageServer

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_EVERY_ADDRESS = ("0.0.0.0", "::")
# Training goes first: so much lower is the priority of this process.
_NICENESS = 10
_MOST_CONNECTIONS = 300
_LONGEST_HEAD_BYTES = 16384


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the server listens, with which token (one is kept beside the folder if it is empty and one is needed).

    `names` are those of proxies before it, as `read_proxy` reads them.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""
    names: tuple[str, ...] = ()
    allows_injection: bool = False

    @property
    def needs_token(self) -> bool:
        """Beyond this machine, behind a proxy, and where a page can kill workers, only those who know the token may ask."""
        return self.host not in LOOPBACK or self.allows_injection or bool(self.names)

    def access(self, port: int, token: str) -> Access:
        """Who may ask the server once it listens on `port`."""
        own = self.host in _EVERY_ADDRESS
        names = () if self.host in LOOPBACK else (socket.gethostname(), socket.getfqdn()) if own else (self.host,)
        return Access.at(port, (*LOOPBACK, *names), token, self.allows_injection, self.names, own)


def serve_page(
    root: Path,
    options: ServerOptions,
    say: Callable[[str], None],
    make_source: MakeSource | None = None,
    injector: Injector | None = None,
) -> None:
    """Serve the runs under `root` until SIGINT or SIGTERM comes; `say` gets the address once it listens."""
    with suppress(OSError):
        os.nice(_NICENESS)
    with listening(options.host, options.port) as listener:
        port = listener.getsockname()[1]
        token = options.token or (kept_token(root) if options.needs_token else "")
        access = options.access(port, token)
        make = partial(ProcessPoolExecutor, 1, get_context("spawn"), initializer=_lower_priority)
        planners = Planners(make) if make_source else None
        server = PageServer(RunList(root), access, make_source, planners, injector)
        say(page_url(options.host, port, token))
        # uvicorn raises a signal again when it has ended: as an exit, so that what is below ends, too.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            http_server(server).run([listener])
        finally:
            if planners is not None:
                planners.close()


def http_server(server: PageServer) -> uvicorn.Server:
    """The server of the application, with limits to what a client may send and hold."""
    config = uvicorn.Config(
        server.application(),
        access_log=False,
        log_level="critical",  # a page that is open when the server ends is no error
        lifespan="off",
        ws="none",
        http=PatientProtocol,
        server_header=False,
        limit_concurrency=_MOST_CONNECTIONS,
        h11_max_incomplete_event_size=_LONGEST_HEAD_BYTES,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


def _lower_priority() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICENESS)


def page_url(host: str, port: int, token: str = "") -> str:
    """The address of the page, with its token."""
    name = socket.gethostname() if host in _EVERY_ADDRESS else host
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/{f'?token={token}' if token else ''}"


def listening(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises UserError if that address and port cannot be listened on."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as problem:
        if isinstance(problem, socket.gaierror) or problem.errno == errno.EADDRNOTAVAIL:
            raise UserError(f"{host} is no address of this machine: give one of its own, or 0.0.0.0 for all of them") from None
        if problem.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} is in use by another program: choose another one for the page, or 0 for any free one"
            ) from None
        raise UserError(f"cannot listen on port {port} ({problem.strerror}): choose one of 1024 to 65535 for the page") from None
