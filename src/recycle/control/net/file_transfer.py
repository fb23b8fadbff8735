"""Files between a worker and the run's folder, which only the coordinator may see: each over a connection of its own.

So a file of any size keeps no lease from being renewed. A file that was brought lies in the folder whole or not at all, on the
disk and not only on its way there; both sides count its bytes and make a digest of them.
"""

import contextlib
import hashlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from recycle.control.decide.messages import Bring, Fetch, File, Message, ProtocolError
from recycle.control.net.handshake import Door, Entered, TurnedAway, knock
from recycle.control.net.wire import MOST_BYTES_OF_STRANGERS, Inbox, framed
from recycle.core.errors import FileProblem

ERRAND = "files"
_BLOCK_BYTES = 1 << 20
# Nobody computes between two blocks.
_SILENCE_S = 30.0
_PAUSE_S = 0.2

MayName = Callable[[Message], bool]
"""Whether what is asked for may be brought or fetched: nobody reaches beyond these files."""


@dataclass(frozen=True, slots=True)
class Courier:
    """A worker's side. While the coordinator is away it waits, but not longer than `patience_s`."""

    door: Door
    patience_s: float = 60.0

    def bring(self, path: Path, name: str) -> None:
        """Have the coordinator keep the file at `path` under a name; raises FileProblem if it cannot."""
        self._try(lambda entered: _bring(entered, path, name), f"cannot bring {name} to the coordinator")

    def fetch(self, name: str, path: Path) -> None:
        """Put the coordinator's file of this name at `path`; raises FileProblem if there is none."""
        self._try(lambda entered: _fetch(entered, name, path), f"cannot fetch {name} from the coordinator")

    def _try(self, errand: Callable[[Entered], None], failure: str) -> None:
        end_s = time.monotonic() + self.patience_s
        while True:
            try:
                entered = knock(self.door, errand=ERRAND)
                entered.stream.settimeout(_SILENCE_S)
                with entered.stream:
                    errand(entered)
                return
            except (TurnedAway, ProtocolError) as problem:
                raise FileProblem(f"{failure}: {problem}") from None
            except OSError as problem:
                is_own = problem.filename is not None  # of a file here, not of the connection
                if is_own or time.monotonic() > end_s:
                    raise FileProblem(f"{failure}: {problem.strerror or problem}") from None
                time.sleep(_PAUSE_S)


def _bring(entered: Entered, path: Path, name: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as source:
        entered.stream.sendall(framed(Bring(name, os.fstat(source.fileno()).st_size)))
        _answer(entered)
        while block := source.read(_BLOCK_BYTES):
            entered.stream.sendall(block)
            digest.update(block)
    if _answer(entered).sha256 != digest.hexdigest():
        raise FileProblem(f"{name} did not reach the coordinator as it was sent: its SHA-256 differs")


def _fetch(entered: Entered, name: str, path: Path) -> None:
    entered.stream.sendall(framed(Fetch(name)))
    found = _answer(entered)
    if _put(path, entered.stream, entered.inbox.rest(), found.size_bytes) != found.sha256:
        path.unlink()
        raise FileProblem(f"{name} did not come as the coordinator sent it: its SHA-256 differs")


def _answer(entered: Entered) -> File:
    message = _message(entered.stream, entered.inbox)
    if not isinstance(message, File):
        raise ProtocolError("the coordinator did not answer")
    if message.problem:
        raise FileProblem(message.problem)
    return message


def serve(stream: socket.socket, folder: Path, may_name: MayName) -> None:
    """The coordinator's side, for one file."""
    stream.settimeout(_SILENCE_S)
    with stream, contextlib.suppress(OSError, ProtocolError):  # whoever asked is gone, or is none of ours
        inbox = Inbox(MOST_BYTES_OF_STRANGERS)
        match message := _message(stream, inbox):
            case Bring() | Fetch() if not may_name(message):
                stream.sendall(framed(File(problem=f"{message.name!r} is no file of a checkpoint")))
            case Bring(size_bytes=size_bytes) if size_bytes < 0:
                stream.sendall(framed(File(problem=f"{message.name} cannot have {size_bytes} bytes")))
            case Bring():
                stream.sendall(framed(File()))
                stream.sendall(framed(_keep(folder / message.name, stream, inbox.rest(), message.size_bytes)))
            case Fetch():
                _send(stream, folder / message.name)


def _keep(path: Path, stream: socket.socket, begun: bytes, size_bytes: int) -> File:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return File(size_bytes, _put(path, stream, begun, size_bytes))
    except FileProblem as problem:
        return File(problem=str(problem))
    except OSError as problem:
        return File(problem=f"cannot write {path}: {problem.strerror or problem}")


def _send(stream: socket.socket, path: Path) -> None:
    try:
        source = path.open("rb")
    except OSError as problem:
        stream.sendall(framed(File(problem=f"cannot read {path}: {problem.strerror or problem}")))
        return
    with source:
        sha256 = hashlib.file_digest(source, "sha256").hexdigest()
        size_bytes = source.tell()
        source.seek(0)
        stream.sendall(framed(File(size_bytes, sha256)))
        stream.sendfile(source)


def _put(path: Path, stream: socket.socket, begun: bytes, size_bytes: int) -> str:
    """Put what comes at `path` in one step, and return its digest. What the disk does not take is read all the same."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as target:
            sha256 = _copy(stream, begun, size_bytes, target)
            os.fsync(target.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return sha256


def _copy(stream: socket.socket, begun: bytes, size_bytes: int, target: BinaryIO) -> str:
    digest, left, problem = hashlib.sha256(), size_bytes, ""
    block = begun[:left]
    while True:
        digest.update(block)
        left -= len(block)
        try:
            if not problem:
                target.write(block)
                if not left:
                    target.flush()
        except OSError as failed:
            problem = f"cannot write {target.name}: {failed.strerror or failed}"
        if not left:
            break
        if not (block := stream.recv(min(left, _BLOCK_BYTES))):
            raise ConnectionError("the other side hung up in the middle of a file")
    if problem:
        raise FileProblem(problem)
    return digest.hexdigest()


def _message(stream: socket.socket, inbox: Inbox) -> Message:
    """The next message; the bytes behind it stay in the inbox."""
    some = b""
    while (message := inbox.take_one(some)) is None:
        if not (some := stream.recv(1 << 12)):
            raise ConnectionError("the other side hung up")
    return message
