"""How a worker gets in at the coordinator's: both sides prove that they have the job's token, and neither ever sends it."""

import os
import socket
import time
from dataclasses import dataclass

from recycle.control.decide.messages import Challenge, ControlMessage, Hello, ProtocolError, Refused, Welcome
from recycle.control.net.wire import MOST_BYTES, FrameReader, encode_frame, is_proof, new_nonce, proof
from recycle.core.release import RELEASE

_CONNECT_S = 5.0


class JoinRefused(Exception):
    """The coordinator does not let this worker in, and why."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a coordinator is, and what opens it."""

    host: str
    port: int
    token: str
    job: str = ""


@dataclass(frozen=True, slots=True)
class Session:
    """A connection to a coordinator that has the token, and what it has said so far."""

    stream: socket.socket
    inbox: FrameReader
    welcome: Welcome
    early: list[ControlMessage]


def shake_hands(door: Endpoint, seat: str = "", member: int = -1, epoch: int = -1, errand: str = "") -> Session:
    """One try at getting in. Raises TurnedAway, or OSError if nobody is there."""
    stream = socket.create_connection((door.host, door.port), _CONNECT_S)
    try:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _enter(door, stream, seat, member, epoch, errand)
    except ProtocolError:
        stream.close()
        raise _nobody(door) from None
    except BaseException:
        stream.close()
        raise


def _enter(door: Endpoint, stream: socket.socket, seat: str, member: int, epoch: int, errand: str) -> Session:
    inbox, early, nonce = FrameReader(MOST_BYTES), list[ControlMessage](), new_nonce()
    challenge = _next(stream, inbox, early)
    if not isinstance(challenge, Challenge):
        raise _nobody(door)
    hello = Hello(
        proof=proof(door.token, "worker", challenge.nonce),
        release=RELEASE,
        job=door.job,
        host=this_host(),
        pid=os.getpid(),
        nonce=nonce,
        clock_us=time.monotonic_ns() // 1000,
        seat=seat,
        member=member,
        epoch=epoch,
        errand=errand,
    )
    stream.sendall(encode_frame(hello))
    answer = _next(stream, inbox, early)
    if not isinstance(answer, Welcome):
        raise JoinRefused(answer.reason if isinstance(answer, Refused) else "the coordinator did not answer a hello")
    if not is_proof(answer.proof, door.token, "coordinator", nonce):
        raise JoinRefused("the coordinator does not have the job's token")
    return Session(stream, inbox, answer, early)


def _nobody(door: Endpoint) -> JoinRefused:
    return JoinRefused(f"what listens at {door.host}:{door.port} is no coordinator")


def _next(stream: socket.socket, inbox: FrameReader, early: list[ControlMessage]) -> ControlMessage:
    """The next message of a connection that is being made; what comes with it and after it is kept."""
    while not early:
        some = stream.recv(1 << 16)
        if not some:
            raise ConnectionError("the coordinator closed the connection")
        early += inbox.take(some)
    return early.pop(0)


def this_host() -> str:
    """What tells this machine, since it was last started, from all others."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            boot = stream.read().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}".strip()
