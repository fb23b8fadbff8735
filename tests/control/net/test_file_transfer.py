"""File transfer: a file arrives completely or not at all, only files of checkpoints do, and no member waits for one."""

import os
import resource
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from recycle.control.decide.messages import ControlMessage, DownloadFile, FileContent, Hello, Refused, UploadFile
from recycle.control.net import file_transfer
from recycle.control.net.file_transfer import PURPOSE, FileTransfer
from recycle.control.net.handshake import shake_hands
from recycle.control.net.server import ConnectionTask
from recycle.control.net.wire import encode_frame
from recycle.core.errors import FileProblem
from tests.control.net.endpoint_harness import PATIENCE_S, FakeCoordinator, ServerHarness, closed_endpoint

pytestmark = pytest.mark.timeout(60)
BYTES = os.urandom((3 << 20) + 7)


class FileCoordinator(FakeCoordinator):
    """Callbacks with a folder, in which files `a/…` may be uploaded and downloaded."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def task_for(self, hello: Hello) -> ConnectionTask | Refused:
        if hello.purpose != PURPOSE:
            return Refused("no such purpose")
        return partial(file_transfer.serve_transfer, folder=self.folder, is_allowed=self.is_allowed)

    @staticmethod
    def is_allowed(message: ControlMessage) -> bool:
        return isinstance(message, UploadFile | DownloadFile) and message.name.startswith("a/") and ".." not in message.name


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The coordinator's folder."""
    return tmp_path / "kept"


@pytest.fixture
def harness(kept: Path) -> Iterator[ServerHarness]:
    made = ServerHarness(0, FileCoordinator(kept))
    yield made
    made.close()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A worker's file."""
    path = tmp_path / "own"
    path.write_bytes(BYTES)
    return path


@pytest.mark.parametrize("body", [BYTES, b"", b"few"])
def test_a_file_is_uploaded_and_downloaded_unchanged(body: bytes, harness: ServerHarness, kept: Path, tmp_path: Path) -> None:
    own, back = tmp_path / "own", tmp_path / "back"
    own.write_bytes(body)
    sender = FileTransfer(harness.endpoint())
    sender.upload(own, "a/file")
    assert (kept / "a" / "file").read_bytes() == body
    sender.download("a/file", back)
    assert back.read_bytes() == body


def test_a_connection_for_a_file_transfer_makes_no_member(harness: ServerHarness, own: Path) -> None:
    FileTransfer(harness.endpoint()).upload(own, "a/file")
    assert harness.callbacks.hellos == []


@pytest.mark.parametrize("name", ["b/file", "a/../../file", "/etc/hostname"])
def test_no_other_file_is_reached(name: str, harness: ServerHarness, own: Path, kept: Path, tmp_path: Path) -> None:
    sender = FileTransfer(harness.endpoint())
    with pytest.raises(FileProblem, match="is no file of a checkpoint"):
        sender.upload(own, name)
    with pytest.raises(FileProblem, match="is no file of a checkpoint"):
        sender.download(name, tmp_path / "back")
    assert not kept.exists()


def test_a_missing_file_cannot_be_downloaded(harness: ServerHarness, tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"cannot read .*a/file: No such file"):
        FileTransfer(harness.endpoint()).download("a/file", tmp_path / "back")
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_uploaded_without_the_token(harness: ServerHarness, own: Path, kept: Path) -> None:
    with pytest.raises(FileProblem, match="this is not the job's token"):
        FileTransfer(harness.endpoint(token="another")).upload(own, "a/file")
    assert not kept.exists()


def test_a_full_disk_is_reported_and_nothing_is_left(harness: ServerHarness, own: Path, kept: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(FileProblem, match=r"cannot write .*: File too large"):
            FileTransfer(harness.endpoint()).upload(own, "a/file")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((kept / "a").iterdir()) == []


def test_a_worker_that_disconnects_in_the_middle_leaves_nothing(harness: ServerHarness, kept: Path) -> None:
    session = shake_hands(harness.endpoint(), purpose=PURPOSE)
    session.stream.sendall(encode_frame(UploadFile("a/file", 1000)) + b"half of it")
    wait_for_files(kept / "a", 1)
    session.stream.close()
    wait_for_files(kept / "a", 0)


def test_a_file_of_negative_size_is_refused(harness: ServerHarness, kept: Path) -> None:
    session = shake_hands(harness.endpoint(), purpose=PURPOSE)
    session.stream.sendall(encode_frame(UploadFile("a/file", -5)))
    (answer,) = session.reader.take(session.stream.recv(1 << 12))
    assert answer == FileContent(problem="a/file cannot have -5 bytes")
    session.stream.close()
    assert not kept.exists()


def wait_for_files(folder: Path, number: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not folder.exists() or len(list(folder.iterdir())) != number:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_a_coordinator_that_is_away_is_waited_for(own: Path, kept: Path) -> None:
    with closed_endpoint() as endpoint:
        pass  # a server listens there later
    made: list[ServerHarness] = []
    timer = threading.Timer(0.3, lambda: made.append(ServerHarness(endpoint.port, FileCoordinator(kept))))
    timer.start()
    FileTransfer(endpoint, timeout_s=PATIENCE_S).upload(own, "a/file")
    assert (kept / "a" / "file").read_bytes() == BYTES
    timer.join()
    made[0].close()


def test_a_coordinator_that_stays_away_is_an_error_in_the_end(own: Path) -> None:
    reason = "cannot upload a/file to the coordinator: Connection refused"
    with closed_endpoint() as endpoint, pytest.raises(FileProblem, match=reason):
        FileTransfer(endpoint, timeout_s=0.0).upload(own, "a/file")


def test_members_are_served_while_a_file_is_on_its_way(harness: ServerHarness) -> None:
    member = harness.member("W0_0")
    session = shake_hands(harness.endpoint(), purpose=PURPOSE)
    session.stream.sendall(encode_frame(UploadFile("a/file", 1000)) + b"half of it")
    assert member.echo_s() < PATIENCE_S
    session.stream.close()
    member.client.close()
