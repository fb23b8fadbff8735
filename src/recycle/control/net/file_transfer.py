"""File transfer between a worker and the run folder, for workers that do not see the folder: one connection a file.

So a file of any size does not delay the renewal of a lease. A transfer may take as long as it needs: what has a deadline is the
time without a byte. An uploaded file is in the folder completely, and synced to disk, or not at all; both sides compare its size
and its digest, which goes in a message with a tag. A downloaded file is read from the connection, so that the worker's disk has
no part in it.
"""

import contextlib
import hashlib
import io
import itertools
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from recycle.control.decide.messages import ControlMessage, DownloadFile, FileContent, ProtocolError, UploadFile
from recycle.control.net.handshake import CoordinatorUnproved, Endpoint, JoinRefused, shake_hands
from recycle.control.net.wire import Session
from recycle.core.errors import FileProblem
from recycle.core.files import replacing

PURPOSE = "file_transfer"
# The longest time without a byte.
SILENCE_S = 30.0
_BLOCK_BYTES = 1 << 20
# A received file is synced to disk in parts of this size: the last part takes a sender less than `SILENCE_S` to wait for.
_SYNC_BYTES = 1 << 26
_RETRY_S = 0.2
# With other coordinators to try, one whose machine is gone is not waited for longer.
_CONNECT_S = 2.0
_MOST_UNPROVED = 3
_PULSE_S = 1.0
_CLOSED = "the other side disconnected"

Result = TypeVar("Result")
IsAllowed = Callable[[ControlMessage], bool]
"""Whether a requested upload or download is allowed: no worker reaches another file."""
Refuse = Callable[[str, str], None]
"""Gets the name and the digest of a file that was sent, and raises FileProblem if it should have another digest."""
Pulse = Callable[[int], object]
"""Gets the number of bytes that have just moved, and 0 about once a second while none does. It may raise, to end a transfer."""


def _no_pulse(num_bytes: int) -> None:
    pass


@dataclass(slots=True)
class FileTransfer:
    """The worker's side. A transfer that is cut begins again, until none has come further than the best one for `timeout_s`.

    Of several coordinators, the one that served last is tried first; one that may not lead refuses, and the next one is tried.
    """

    endpoint: Endpoint
    timeout_s: float = 300.0
    silence_s: float = SILENCE_S
    _served_by: int = field(default=0, init=False, compare=False)

    def upload(self, path: Path, name: str, pulse: Pulse = _no_pulse) -> None:
        """Store the file at `path` in the run folder under a name. Raises FileProblem if the coordinator cannot store it."""
        self._retry(lambda link: _upload(link, path, name), f"cannot upload {name} to the coordinator", pulse)

    def download(self, name: str, read: Callable[[BinaryIO, int], Result], pulse: Pulse = _no_pulse) -> Result:
        """Return what `read` makes of the run folder's file of this name, and its size. Raises FileProblem if there is none.

        `read` is called again if the connection is lost meanwhile.
        """
        return self._retry(lambda link: _download(link, name, read), f"cannot download {name} from the coordinator", pulse)

    def _retry(self, transfer: Callable[["_Link"], Result], failure: str, pulse: Pulse) -> Result:
        progress, num_unproved = _Progress(pulse), 0
        for number in itertools.count(self._served_by):
            try:
                progress.begin_again()
                session, _ = shake_hands(
                    self.endpoint.at(number),
                    purpose=PURPOSE,
                    on_waiting=lambda: pulse(1),
                    connect_s=_CONNECT_S if self.endpoint.others else None,
                )
                self._served_by = number
                with session.stream:
                    return transfer(_Link(session, self.silence_s, progress.add))
            except (CoordinatorUnproved, ProtocolError) as problem:  # perhaps by somebody in the middle
                num_unproved += 1
                if num_unproved > _MOST_UNPROVED:
                    raise FileProblem(f"{failure}: {problem}") from None
                time.sleep(_RETRY_S)
            except JoinRefused as problem:
                raise FileProblem(f"{failure}: {problem}") from None
            except OSError as problem:
                is_local = problem.filename is not None  # of a file here, not of the connection
                if is_local or time.monotonic() > progress.further_s + self.timeout_s:
                    raise FileProblem(f"{failure}: {problem.strerror or problem}") from None
                pulse(0)
                time.sleep(_RETRY_S)
        raise AssertionError("the tries do not end by themselves")


class _Progress:
    """When a transfer has last come further than in any try before; `pulse` hears of all bytes."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse, self.further_s = pulse, time.monotonic()
        self._num_bytes = self._furthest = 0

    def begin_again(self) -> None:
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > self._furthest:
            self._furthest, self.further_s = self._num_bytes, time.monotonic()
        self._pulse(num_bytes)


class _Link:
    """A connection for one file. It waits as long as bytes move, and raises TimeoutError after `silence_s` without one."""

    # TLS says nothing of bytes before all that it was given has been sent.
    _TLS_BYTES = 1 << 14

    def __init__(self, session: Session, silence_s: float, pulse: Pulse = _no_pulse) -> None:
        self._session, self._stream, self._reader = session, session.stream, session.reader
        self._silence_s, self._pulse = silence_s, pulse
        self._most_bytes = self._TLS_BYTES if isinstance(session.stream, ssl.SSLSocket) else _BLOCK_BYTES
        self._stream.settimeout(min(_PULSE_S, silence_s))

    def send(self, block: bytes) -> None:
        rest = memoryview(block)
        while rest:
            num_sent = self._patiently(
                self._stream.send, rest[: self._most_bytes]
            )  # not `sendall`, whose time limit is for all bytes
            self._pulse(num_sent)
            rest = rest[num_sent:]

    def send_message(self, message: ControlMessage) -> None:
        self.send(self._session.frame(message))

    def receive_message(self) -> ControlMessage:
        return self._reader.receive(lambda most: self._patiently(self._stream.recv, most), _CLOSED)

    def receive_into(self, view: memoryview) -> int:
        """Store at least one byte in `view`; return how many there are."""
        if begun := self._reader.take_bytes(len(view)):
            view[: len(begun)] = begun
            return len(begun)
        num_bytes: int = self._patiently(self._stream.recv_into, view)
        if not num_bytes:
            raise ConnectionError("the other side disconnected in the middle of a file")
        self._pulse(num_bytes)
        return num_bytes

    def _patiently(self, operation: Callable[..., Any], *args: Any) -> Any:
        end_s = time.monotonic() + self._silence_s
        while True:
            try:
                return operation(*args)
            except TimeoutError:
                if time.monotonic() >= end_s:
                    raise TimeoutError(f"no byte came or went for {self._silence_s:g} s") from None
                self._pulse(0)


class _Incoming(io.RawIOBase):
    """The bytes of a file on their way, as a file to read; `digest` is that of the bytes that were read."""

    def __init__(self, link: _Link, size_bytes: int) -> None:
        self._link, self._left = link, size_bytes
        self.digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: self._left]
        num_bytes = self._link.receive_into(view) if view else 0
        self.digest.update(view[:num_bytes])
        self._left -= num_bytes
        return num_bytes


def _upload(link: _Link, path: Path, name: str) -> None:
    with path.open("rb") as source:
        link.send_message(UploadFile(name, os.fstat(source.fileno()).st_size))
        _answer(link)
        sha256 = _send_bytes(link, source)
        link.send_message(FileContent(sha256=sha256))
    if _answer(link).sha256 != sha256:
        raise FileProblem(f"{name} did not reach the coordinator as it was sent: its SHA-256 differs")


def _download(link: _Link, name: str, read: Callable[[BinaryIO, int], Result]) -> Result:
    link.send_message(DownloadFile(name))
    size_bytes = _answer(link).size_bytes
    incoming = _Incoming(link, size_bytes)
    with io.BufferedReader(incoming, _BLOCK_BYTES) as stream:
        result = read(stream, size_bytes)
    if _answer(link).sha256 != incoming.digest.hexdigest():
        raise FileProblem(f"{name} did not come as the coordinator sent it: its SHA-256 differs")
    return result


def _answer(link: _Link) -> FileContent:
    message = link.receive_message()
    if not isinstance(message, FileContent):
        raise ProtocolError("the coordinator did not answer")
    if message.problem:
        raise FileProblem(message.problem)
    return message


def _send_bytes(link: _Link, source: BinaryIO) -> str:
    """Send the rest of a file, and return its digest."""
    digest = hashlib.sha256()
    while block := source.read(_BLOCK_BYTES):
        link.send(block)
        digest.update(block)
    return digest.hexdigest()


def serve_transfer(
    session: Session,
    folder: Path,
    is_allowed: IsAllowed,
    silence_s: float = SILENCE_S,
    refuse: Refuse = lambda name, sha256: None,
) -> None:
    """Serve one file to a worker, or store one of it. `refuse` raises FileProblem if a file that was sent has another digest."""
    with session.stream, contextlib.suppress(OSError, ProtocolError):  # the worker is gone, or is not of this release
        link = _Link(session, silence_s)
        match message := link.receive_message():
            case UploadFile() | DownloadFile() if not is_allowed(message):
                link.send_message(FileContent(problem=f"{message.name!r} is no file of a checkpoint"))
            case UploadFile(size_bytes=size_bytes) if size_bytes < 0:
                link.send_message(FileContent(problem=f"{message.name} cannot have {size_bytes} bytes"))
            case UploadFile():
                link.send_message(FileContent())
                link.send_message(_store(folder / message.name, link, message.size_bytes))
            case DownloadFile():
                _send(link, folder / message.name, partial(refuse, message.name))


def _store(path: Path, link: _Link, size_bytes: int) -> FileContent:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileContent(size_bytes, _receive(path, link, size_bytes))
    except FileProblem as problem:
        return FileContent(problem=str(problem))
    except TimeoutError as problem:
        return FileContent(problem=f"{path.name} was given up: {problem}")
    except OSError as problem:
        return FileContent(problem=f"cannot write {path}: {problem.strerror or problem}")


def _send(link: _Link, path: Path, refuse: Callable[[str], None]) -> None:
    try:
        source = path.open("rb")
    except OSError as problem:
        link.send_message(FileContent(problem=f"cannot read {path}: {problem.strerror or problem}"))
        return
    with source:
        link.send_message(FileContent(os.fstat(source.fileno()).st_size))
        sha256 = _send_bytes(link, source)
    try:
        refuse(sha256)
        link.send_message(FileContent(sha256=sha256))
    except FileProblem as problem:
        link.send_message(FileContent(problem=str(problem)))


def _receive(path: Path, link: _Link, size_bytes: int) -> str:
    """Store the received bytes at `path` atomically, and return their digest. Raises FileProblem if it is not the sender's."""
    incoming = _Incoming(link, size_bytes)
    with replacing(path) as temporary, temporary.open("xb") as target:
        problem = _write(incoming, target)
        sent, sha256 = link.receive_message(), incoming.digest.hexdigest()
        if problem:
            raise FileProblem(problem)
        if not isinstance(sent, FileContent) or sent.sha256 != sha256:
            raise FileProblem(f"{path.name} did not come as the worker sent it: its SHA-256 differs")
    return sha256


def _write(incoming: _Incoming, target: BinaryIO) -> str:
    """Write the received bytes, and sync them to the disk; return a sentence if that fails.

    All are read, even if the disk takes no more: who closes a connection with bytes in it loses its last message.
    """
    problem, num_unsynced = "", 0
    while True:
        block = incoming.read(_BLOCK_BYTES)
        try:
            if not problem:
                target.write(block or b"")
                num_unsynced += len(block or b"")
                if not block or num_unsynced >= _SYNC_BYTES:
                    target.flush()
                    os.fsync(target.fileno())
                    num_unsynced = 0
        except OSError as failed:
            problem = f"cannot write {target.name}: {failed.strerror or failed}"
        if not block:
            return problem
