"""File transfer between a worker and the run folder, for workers that do not see the folder: one connection a file.

So a file of any size does not delay the renewal of a lease. An uploaded file is in the folder completely, and synced to disk, or
not at all; both sides compare its size and its digest.
"""

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from recycle.control.decide.messages import ControlMessage, DownloadFile, FileContent, ProtocolError, UploadFile
from recycle.control.net.handshake import Endpoint, JoinRefused, Session, shake_hands
from recycle.control.net.wire import MOST_BYTES_UNPROVED, FrameReader, encode_frame
from recycle.core.errors import FileProblem
from recycle.core.files import replacing

PURPOSE = "file_transfer"
_BLOCK_BYTES = 1 << 20
# The longest pause between two blocks.
_SILENCE_S = 30.0
_RETRY_S = 0.2
_CLOSED = "the other side disconnected"

IsAllowed = Callable[[ControlMessage], bool]
"""Whether a requested upload or download is allowed: no worker reaches another file."""


@dataclass(frozen=True, slots=True)
class FileTransfer:
    """The worker's side. While the coordinator is away it retries for `timeout_s`."""

    endpoint: Endpoint
    timeout_s: float = 60.0

    def upload(self, path: Path, name: str) -> None:
        """Store the file at `path` in the run folder under a name. Raises FileProblem if the coordinator cannot store it."""
        self._retry(lambda session: _upload(session, path, name), f"cannot upload {name} to the coordinator")

    def download(self, name: str, path: Path) -> None:
        """Store the run folder's file of this name at `path`. Raises FileProblem if there is none."""
        self._retry(lambda session: _download(session, name, path), f"cannot download {name} from the coordinator")

    def _retry(self, transfer: Callable[[Session], None], failure: str) -> None:
        end_s = time.monotonic() + self.timeout_s
        while True:
            try:
                session = shake_hands(self.endpoint, purpose=PURPOSE)
                session.stream.settimeout(_SILENCE_S)
                with session.stream:
                    transfer(session)
                return
            except (JoinRefused, ProtocolError) as problem:
                raise FileProblem(f"{failure}: {problem}") from None
            except OSError as problem:
                is_local = problem.filename is not None  # of a file here, not of the connection
                if is_local or time.monotonic() > end_s:
                    raise FileProblem(f"{failure}: {problem.strerror or problem}") from None
                time.sleep(_RETRY_S)


def _upload(session: Session, path: Path, name: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as source:
        session.stream.sendall(encode_frame(UploadFile(name, os.fstat(source.fileno()).st_size)))
        _answer(session)
        while block := source.read(_BLOCK_BYTES):
            session.stream.sendall(block)
            digest.update(block)
    if _answer(session).sha256 != digest.hexdigest():
        raise FileProblem(f"{name} did not reach the coordinator as it was sent: its SHA-256 differs")


def _download(session: Session, name: str, path: Path) -> None:
    session.stream.sendall(encode_frame(DownloadFile(name)))
    found = _answer(session)
    if _receive(path, session.stream, session.reader.rest(), found.size_bytes) != found.sha256:
        path.unlink()
        raise FileProblem(f"{name} did not come as the coordinator sent it: its SHA-256 differs")


def _answer(session: Session) -> FileContent:
    message = session.reader.receive(session.stream, _CLOSED)
    if not isinstance(message, FileContent):
        raise ProtocolError("the coordinator did not answer")
    if message.problem:
        raise FileProblem(message.problem)
    return message


def serve_transfer(stream: socket.socket, folder: Path, is_allowed: IsAllowed) -> None:
    stream.settimeout(_SILENCE_S)
    with stream, contextlib.suppress(OSError, ProtocolError):  # the worker is gone, or is not of this release
        reader = FrameReader(MOST_BYTES_UNPROVED)
        match message := reader.receive(stream, _CLOSED):
            case UploadFile() | DownloadFile() if not is_allowed(message):
                stream.sendall(encode_frame(FileContent(problem=f"{message.name!r} is no file of a checkpoint")))
            case UploadFile(size_bytes=size_bytes) if size_bytes < 0:
                stream.sendall(encode_frame(FileContent(problem=f"{message.name} cannot have {size_bytes} bytes")))
            case UploadFile():
                stream.sendall(encode_frame(FileContent()))
                stream.sendall(encode_frame(_store(folder / message.name, stream, reader.rest(), message.size_bytes)))
            case DownloadFile():
                _send(stream, folder / message.name)


def _store(path: Path, stream: socket.socket, begun: bytes, size_bytes: int) -> FileContent:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileContent(size_bytes, _receive(path, stream, begun, size_bytes))
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


def _receive(path: Path, stream: socket.socket, begun: bytes, size_bytes: int) -> str:
    """Store the received bytes at `path` atomically, and return their digest."""
    with replacing(path) as temporary, temporary.open("xb") as target:
        sha256 = _copy(stream, begun, size_bytes, target)
        os.fsync(target.fileno())
    return sha256


def _copy(stream: socket.socket, begun: bytes, size_bytes: int, target: BinaryIO) -> str:
    """Write the received bytes to `target`, and return their digest. All are read even if the disk takes no more."""
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
            raise ConnectionError("the other side disconnected in the middle of a file")
    if problem:
        raise FileProblem(problem)
    return digest.hexdigest()
