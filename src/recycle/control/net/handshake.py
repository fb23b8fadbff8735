"""The handshake of a worker with its coordinator: each side proves by the tags of its frames that it has the job's token."""

import os
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from recycle.control.decide.messages import Challenge, Hello, ProtocolError, Refused, Waiting, Welcome
from recycle.control.net.tls import TlsFiles, refusal_by_tls
from recycle.control.net.wire import (
    COORDINATOR,
    MOST_BYTES,
    MOST_BYTES_UNPROVED,
    WORKER,
    FrameReader,
    Seal,
    Session,
    WrongTag,
    encode,
    make_frame,
    new_nonce,
)
from recycle.core.errors import FileProblem
from recycle.core.release import RELEASE

# Longer than the coordinator waits for a hello: a worker that does not use TLS, as it must, hears that it is disconnected.
_CONNECT_S = 10.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESS_IDS = "/proc/self/ns/pid"
_CLOSED = "the coordinator closed the connection"
_CLOSED_AT_ONCE = (
    "it closed the connection before its first message; if the coordinator uses TLS, give --tls-cert, --tls-key and --tls-ca"
)


class JoinRefused(Exception):
    """The coordinator refused this worker, and why. If `may_retry`, another process on this machine could join."""

    def __init__(self, reason: str, may_retry: bool = False) -> None:
        super().__init__(reason)
        self.may_retry = may_retry


class CoordinatorUnproved(JoinRefused):
    """What answers has not proved that it is the job's coordinator: it may be another program, or somebody in the middle."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a coordinator, the token of its job, and the job's name; `tls` if its control connections use TLS.

    `others` are the addresses of other coordinators of the job, one of which may lead instead.
    """

    host: str
    port: int
    token: str
    job: str = ""
    tls: TlsFiles | None = None
    others: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self._addresses)

    @property
    def _addresses(self) -> tuple[tuple[str, int], ...]:
        return (self.host, self.port), *self.others

    def at(self, number: int) -> "Endpoint":
        """The endpoint of the coordinator with this number; numbers go round."""
        addresses = self._addresses
        host, port = addresses[number % len(addresses)]
        return replace(self, host=host, port=port, others=())


def shake_hands(
    endpoint: Endpoint,
    preferred_place: str = "",
    member: int = -1,
    epoch: int = -1,
    purpose: str = "",
    on_waiting: Callable[[], object] = lambda: None,
    timeout_s: float | None = None,
    connect_s: float | None = None,
) -> tuple[Session, Welcome]:
    """Connect once. Raises JoinRefused, CoordinatorUnproved, or OSError if no process listens at the endpoint.

    `on_waiting` is called about once a second while others come first; it may raise. A machine that is gone does not even refuse:
    a connection must be there after `connect_s`, and every message after `timeout_s`.
    """
    hello = Hello(
        release=RELEASE,
        job=endpoint.job,
        host=this_host(),
        pid=os.getpid(),
        nonce=new_nonce(),
        clock_us=time.monotonic_ns() // 1000,
        preferred_place=preferred_place,
        member=member,
        epoch=epoch,
        purpose=purpose,
    )
    timeout_s = timeout_s or _CONNECT_S
    stream = socket.create_connection((endpoint.host, endpoint.port), connect_s or timeout_s)
    try:
        stream.settimeout(timeout_s)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if endpoint.tls is not None:
            stream = endpoint.tls.client_context().wrap_socket(stream, server_hostname=endpoint.host)
        return _introduce(stream, endpoint, hello, on_waiting)
    except (ProtocolError, ssl.SSLError, FileProblem) as problem:
        stream.close()
        raise _explained(problem, f"{endpoint.host}:{endpoint.port}") from None
    except BaseException:
        stream.close()
        raise


def _introduce(
    stream: socket.socket, endpoint: Endpoint, hello: Hello, on_waiting: Callable[[], object]
) -> tuple[Session, Welcome]:
    reader = FrameReader(MOST_BYTES_UNPROVED)
    challenge = reader.receive(stream.recv, _CLOSED if endpoint.tls is not None else _CLOSED_AT_ONCE)
    if not isinstance(challenge, Challenge):
        raise ProtocolError("the first message is no challenge")
    if challenge.release != RELEASE:
        raise CoordinatorUnproved(f"the worker is of release {RELEASE}, but the job runs {challenge.release}")
    reader.seal, reader.most_bytes = Seal(endpoint.token, COORDINATOR, challenge.nonce, hello.nonce), MOST_BYTES
    stream.sendall(b"".join(make_frame(encode(hello), Seal(endpoint.token, WORKER, challenge.nonce))))
    session = Session(stream, reader, Seal(endpoint.token, WORKER, challenge.nonce, hello.nonce))
    while isinstance(answer := reader.receive(stream.recv, _CLOSED), Waiting):
        on_waiting()
    if isinstance(answer, Refused) and answer.tries_again:
        raise ConnectionError(answer.reason)
    if isinstance(answer, Refused):
        raise JoinRefused(answer.reason, answer.may_retry)
    if not isinstance(answer, Welcome):
        raise JoinRefused("the coordinator did not answer a hello")
    return session, answer


def _explained(problem: Exception, where: str) -> Exception:
    """The exception with a sentence that says what is wrong at the endpoint; `problem` itself if the connection broke."""
    match problem:
        case WrongTag():
            return CoordinatorUnproved(f"this is not the job's token, or what answers at {where} is not its coordinator")
        case ProtocolError():
            return CoordinatorUnproved(f"what listens at {where} is no coordinator")
        case ssl.SSLError():
            reason = refusal_by_tls(problem, where)
            return CoordinatorUnproved(reason) if reason else problem
    return CoordinatorUnproved(str(problem))  # of the files of TLS, which may be renewed just now


@cache  # so that a process without a free descriptor knows it still
def this_host() -> str:
    """Return a name of this machine that is unique and changes when it boots.

    Containers of one machine have other names if they have process ids of their own: nobody outside may kill by these ids.
    """
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    processes = os.readlink(_PROCESS_IDS) if os.path.lexists(_PROCESS_IDS) else ""
    return f"{socket.gethostname()} {boot} {processes}".strip()
