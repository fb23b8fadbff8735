"""Files that travel: whole or not at all, only those of checkpoints, and nobody else waits for them."""

import os
import resource
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from recycle.control.decide.messages import ControlMessage, DownloadFile, FileContent, Hello, Refused, UploadFile
from recycle.control.net import file_transfer as courier
from recycle.control.net.file_transfer import ERRAND, FileTransfer
from recycle.control.net.handshake import shake_hands
from recycle.control.net.server import ConnectionTask
from recycle.control.net.wire import encode_frame
from recycle.core.errors import FileProblem
from tests.control.net.endpoint_harness import PATIENCE_S, Porter, Post, closed_door

pytestmark = pytest.mark.timeout(60)
BYTES = os.urandom((3 << 20) + 7)


class Keeper(Porter):
    """A porter with a folder, in which `a/…` may be brought and fetched."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def errand(self, hello: Hello) -> ConnectionTask | Refused:
        if hello.errand != ERRAND:
            return Refused("no such errand")
        return partial(courier.serve_transfer, folder=self.folder, may_name=self.may_name)

    @staticmethod
    def may_name(message: ControlMessage) -> bool:
        return isinstance(message, UploadFile | DownloadFile) and message.name.startswith("a/") and ".." not in message.name


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The coordinator's folder."""
    return tmp_path / "kept"


@pytest.fixture
def post(kept: Path) -> Iterator[Post]:
    made = Post(0, Keeper(kept))
    yield made
    made.close()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A worker's file."""
    path = tmp_path / "own"
    path.write_bytes(BYTES)
    return path


@pytest.mark.parametrize("body", [BYTES, b"", b"few"])
def test_a_file_is_brought_and_fetched_as_it_is(body: bytes, post: Post, kept: Path, tmp_path: Path) -> None:
    own, back = tmp_path / "own", tmp_path / "back"
    own.write_bytes(body)
    sender = FileTransfer(post.door())
    sender.bring(own, "a/file")
    assert (kept / "a" / "file").read_bytes() == body
    sender.fetch("a/file", back)
    assert back.read_bytes() == body


def test_who_is_on_an_errand_is_no_member(post: Post, own: Path) -> None:
    FileTransfer(post.door()).bring(own, "a/file")
    assert post.porter.hellos == []


@pytest.mark.parametrize("name", ["b/file", "a/../../file", "/etc/hostname"])
def test_nothing_but_these_files_is_reached(name: str, post: Post, own: Path, kept: Path, tmp_path: Path) -> None:
    sender = FileTransfer(post.door())
    with pytest.raises(FileProblem, match="is no file of a checkpoint"):
        sender.bring(own, name)
    with pytest.raises(FileProblem, match="is no file of a checkpoint"):
        sender.fetch(name, tmp_path / "back")
    assert not kept.exists()


def test_what_is_not_there_cannot_be_fetched(post: Post, tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"cannot read .*a/file: No such file"):
        FileTransfer(post.door()).fetch("a/file", tmp_path / "back")
    assert list(tmp_path.iterdir()) == []


def test_nobody_brings_or_fetches_without_the_token(post: Post, own: Path, kept: Path) -> None:
    with pytest.raises(FileProblem, match="this is not the job's token"):
        FileTransfer(post.door(token="another")).bring(own, "a/file")
    assert not kept.exists()


def test_a_disk_that_takes_no_more_is_told_of_and_nothing_is_left(post: Post, own: Path, kept: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(FileProblem, match=r"cannot write .*: File too large"):
            FileTransfer(post.door()).bring(own, "a/file")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((kept / "a").iterdir()) == []


def test_who_hangs_up_in_the_middle_leaves_nothing(post: Post, kept: Path) -> None:
    entered = shake_hands(post.door(), errand=ERRAND)
    entered.stream.sendall(encode_frame(UploadFile("a/file", 1000)) + b"half of it")
    wait_for_files(kept / "a", 1)
    entered.stream.close()
    wait_for_files(kept / "a", 0)


def test_a_file_of_no_possible_size_is_refused(post: Post, kept: Path) -> None:
    entered = shake_hands(post.door(), errand=ERRAND)
    entered.stream.sendall(encode_frame(UploadFile("a/file", -5)))
    (answer,) = entered.inbox.take(entered.stream.recv(1 << 12))
    assert answer == FileContent(problem="a/file cannot have -5 bytes")
    entered.stream.close()
    assert not kept.exists()


def wait_for_files(folder: Path, number: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not folder.exists() or len(list(folder.iterdir())) != number:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_a_coordinator_that_is_away_is_waited_for(own: Path, kept: Path) -> None:
    with closed_door() as door:
        pass  # it is opened later
    made: list[Post] = []
    timer = threading.Timer(0.3, lambda: made.append(Post(door.port, Keeper(kept))))
    timer.start()
    FileTransfer(door, patience_s=PATIENCE_S).bring(own, "a/file")
    assert (kept / "a" / "file").read_bytes() == BYTES
    timer.join()
    made[0].close()


def test_but_not_for_ever(own: Path) -> None:
    reason = "cannot bring a/file to the coordinator: Connection refused"
    with closed_door() as door, pytest.raises(FileProblem, match=reason):
        FileTransfer(door, patience_s=0.0).bring(own, "a/file")


def test_members_are_served_while_a_file_is_on_its_way(post: Post) -> None:
    member = post.member("W0_0")
    entered = shake_hands(post.door(), errand=ERRAND)
    entered.stream.sendall(encode_frame(UploadFile("a/file", 1000)) + b"half of it")
    assert member.echo_s() < PATIENCE_S
    entered.stream.close()
    member.client.close()
