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

from recycle.control.decide.messages import ControlMessage, DownloadFile, FileContent, ProtocolError, UploadFile
from recycle.control.net.handshake import Endpoint, JoinRefused, Session, shake_hands
from recycle.control.net.wire import MOST_BYTES_OF_STRANGERS, FrameReader, encode_frame
from recycle.core.errors import FileProblem

ERRAND = "files"
_BLOCK_BYTES = 1 << 20
# Nobody computes between two blocks.
_SILENCE_S = 30.0
_PAUSE_S = 0.2

MayName = Callable[[ControlMessage], bool]
"""Whether what is asked for may be brought or fetched: nobody reaches beyond these files."""


@dataclass(frozen=True, slots=True)
class FileTransfer:
    """A worker's side. While the coordinator is away it waits, but not longer than `patience_s`."""

    door: Endpoint
    patience_s: float = 60.0

    def bring(self, path: Path, name: str) -> None:
        """Have the coordinator keep the file at `path` under a name; raises FileProblem if it cannot."""
        self._try(lambda entered: _bring(entered, path, name), f"cannot bring {name} to the coordinator")

    def fetch(self, name: str, path: Path) -> None:
        """Put the coordinator's file of this name at `path`; raises FileProblem if there is none."""
        self._try(lambda entered: _fetch(entered, name, path), f"cannot fetch {name} from the coordinator")

    def _try(self, errand: Callable[[Session], None], failure: str) -> None:
        end_s = time.monotonic() + self.patience_s
        while True:
            try:
                entered = shake_hands(self.door, errand=ERRAND)
                entered.stream.settimeout(_SILENCE_S)
                with entered.stream:
                    errand(entered)
                return
            except (JoinRefused, ProtocolError) as problem:
                raise FileProblem(f"{failure}: {problem}") from None
            except OSError as problem:
                is_own = problem.filename is not None  # of a file here, not of the connection
                if is_own or time.monotonic() > end_s:
                    raise FileProblem(f"{failure}: {problem.strerror or problem}") from None
                time.sleep(_PAUSE_S)


def _bring(entered: Session, path: Path, name: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as source:
        entered.stream.sendall(encode_frame(UploadFile(name, os.fstat(source.fileno()).st_size)))
        _answer(entered)
        while block := source.read(_BLOCK_BYTES):
            entered.stream.sendall(block)
            digest.update(block)
    if _answer(entered).sha256 != digest.hexdigest():
        raise FileProblem(f"{name} did not reach the coordinator as it was sent: its SHA-256 differs")


def _fetch(entered: Session, name: str, path: Path) -> None:
    entered.stream.sendall(encode_frame(DownloadFile(name)))
    found = _answer(entered)
    if _put(path, entered.stream, entered.inbox.rest(), found.size_bytes) != found.sha256:
        path.unlink()
        raise FileProblem(f"{name} did not come as the coordinator sent it: its SHA-256 differs")


def _answer(entered: Session) -> FileContent:
    message = _message(entered.stream, entered.inbox)
    if not isinstance(message, FileContent):
        raise ProtocolError("the coordinator did not answer")
    if message.problem:
        raise FileProblem(message.problem)
    return message


def serve_transfer(stream: socket.socket, folder: Path, may_name: MayName) -> None:
    """The coordinator's side, for one file."""
    stream.settimeout(_SILENCE_S)
    with stream, contextlib.suppress(OSError, ProtocolError):  # whoever asked is gone, or is none of ours
        inbox = FrameReader(MOST_BYTES_OF_STRANGERS)
        match message := _message(stream, inbox):
            case UploadFile() | DownloadFile() if not may_name(message):
                stream.sendall(encode_frame(FileContent(problem=f"{message.name!r} is no file of a checkpoint")))
            case UploadFile(size_bytes=size_bytes) if size_bytes < 0:
                stream.sendall(encode_frame(FileContent(problem=f"{message.name} cannot have {size_bytes} bytes")))
            case UploadFile():
                stream.sendall(encode_frame(FileContent()))
                stream.sendall(encode_frame(_keep(folder / message.name, stream, inbox.rest(), message.size_bytes)))
            case DownloadFile():
                _send(stream, folder / message.name)


def _keep(path: Path, stream: socket.socket, begun: bytes, size_bytes: int) -> FileContent:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileContent(size_bytes, _put(path, stream, begun, size_bytes))
    except FileProblem as problem:
        return FileContent(problem=str(problem))
    except OSError as problem:
        return FileContent(problem=f"cannot write {path}: {problem.strerror or problem}")


def _send(stream: socket.socket, path: Path) -> None:
    try:
        source = path.open("rb")
    except OSError as problem:
        stream.sendall(encode_frame(FileContent(problem=f"cannot read {path}: {problem.strerror or problem}")))
        return
    with source:
        sha256 = hashlib.file_digest(source, "sha256").hexdigest()
        size_bytes = source.tell()
        source.seek(0)
        stream.sendall(encode_frame(FileContent(size_bytes, sha256)))
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


def _message(stream: socket.socket, inbox: FrameReader) -> ControlMessage:
    """The next message; the bytes behind it stay in the inbox."""
    some = b""
    while (message := inbox.take_one(some)) is None:
        if not (some := stream.recv(1 << 12)):
            raise ConnectionError("the other side hung up")
    return message
