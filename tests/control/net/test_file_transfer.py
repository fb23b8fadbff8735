"""File transfer: a file arrives completely or not at all, only files of checkpoints do, and no member waits for one."""

import hashlib
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pytest

from recycle.control.decide.messages import ControlMessage, DownloadFile, FileContent, Hello, Refused, UploadFile
from recycle.control.net import file_transfer, server
from recycle.control.net.file_transfer import PURPOSE, FileTransfer
from recycle.control.net.handshake import shake_hands
from recycle.control.net.server import ConnectionTask
from recycle.core.errors import FileProblem
from tests.control.net.endpoint_harness import PATIENCE_S, FakeCoordinator, ServerHarness, closed_endpoint
from tests.processes import wait_for

pytestmark = pytest.mark.timeout(60)
BYTES = os.urandom((3 << 20) + 7)


def read_all(stream: BinaryIO, size_bytes: int) -> bytes:
    data = stream.read()
    assert len(data) == size_bytes
    return data


class FileCoordinator(FakeCoordinator):
    """Callbacks with a folder, in which files `a/…` may be uploaded and downloaded."""

    def __init__(self, folder: Path, silence_s: float = PATIENCE_S) -> None:
        super().__init__()
        self.folder, self.silence_s = folder, silence_s

    def task_for(self, hello: Hello) -> ConnectionTask | Refused:
        if hello.purpose != PURPOSE:
            return Refused("no such purpose")
        return partial(
            file_transfer.serve_transfer,
            folder=self.folder,
            is_allowed=self.is_allowed,
            silence_s=self.silence_s,
            refuse=self.refuse,
        )

    def refuse(self, name: str, sha256: str) -> None:
        if name == "a/flipped" and sha256 != hashlib.sha256(BYTES).hexdigest():
            raise FileProblem("a/flipped does not have the bytes that were written")

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
    own = tmp_path / "own"
    own.write_bytes(body)
    sender = FileTransfer(harness.endpoint())
    sender.upload(own, "a/file")
    assert (kept / "a" / "file").read_bytes() == body
    assert sender.download("a/file", read_all) == body


def test_a_connection_for_a_file_transfer_makes_no_member(harness: ServerHarness, own: Path) -> None:
    FileTransfer(harness.endpoint()).upload(own, "a/file")
    assert harness.callbacks.hellos == []


@pytest.mark.parametrize("name", ["b/file", "a/../../file", "/etc/hostname"])
def test_no_other_file_is_reached(name: str, harness: ServerHarness, own: Path, kept: Path) -> None:
    sender = FileTransfer(harness.endpoint())
    with pytest.raises(FileProblem, match="is no file of a checkpoint"):
        sender.upload(own, name)
    with pytest.raises(FileProblem, match="is no file of a checkpoint"):
        sender.download(name, read_all)
    assert not kept.exists()


def test_a_missing_file_cannot_be_downloaded(harness: ServerHarness) -> None:
    with pytest.raises(FileProblem, match=r"cannot read .*a/file: No such file"):
        FileTransfer(harness.endpoint()).download("a/file", read_all)


def test_a_file_that_has_changed_since_it_was_written_is_not_taken(harness: ServerHarness, kept: Path) -> None:
    (kept / "a").mkdir(parents=True)
    (kept / "a" / "flipped").write_bytes(BYTES)
    assert FileTransfer(harness.endpoint()).download("a/flipped", read_all) == BYTES
    (kept / "a" / "flipped").write_bytes(BYTES[:-1] + bytes([BYTES[-1] ^ 1]))
    with pytest.raises(FileProblem, match="does not have the bytes that were written"):
        FileTransfer(harness.endpoint()).download("a/flipped", read_all)


def test_no_file_is_uploaded_without_the_token(harness: ServerHarness, own: Path, kept: Path) -> None:
    with pytest.raises(FileProblem, match="this is not the job's token"):
        FileTransfer(harness.endpoint(token="another")).upload(own, "a/file")
    assert not kept.exists()


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file can be larger than a megabyte."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_reported_and_nothing_is_left(harness: ServerHarness, own: Path, kept: Path, full_disk: None) -> None:
    with pytest.raises(FileProblem, match=r"cannot write .*: File too large"):
        FileTransfer(harness.endpoint()).upload(own, "a/file")
    assert list((kept / "a").iterdir()) == []


def test_a_worker_that_disconnects_in_the_middle_leaves_nothing(harness: ServerHarness, kept: Path) -> None:
    session, _ = shake_hands(harness.endpoint(), purpose=PURPOSE)
    session.stream.sendall(session.frame(UploadFile("a/file", 1000)) + b"half of it")
    wait_for_files(kept / "a", 1)
    session.stream.close()
    wait_for_files(kept / "a", 0)


def test_a_file_of_negative_size_is_refused(harness: ServerHarness, kept: Path) -> None:
    session, _ = shake_hands(harness.endpoint(), purpose=PURPOSE)
    session.stream.sendall(session.frame(UploadFile("a/file", -5)))
    (answer,) = session.reader.take(session.stream.recv(1 << 12))
    assert answer == FileContent(problem="a/file cannot have -5 bytes")
    session.stream.close()
    assert not kept.exists()


def wait_for_files(folder: Path, number: int) -> None:
    wait_for(lambda: folder.exists() and len(list(folder.iterdir())) == number, PATIENCE_S)


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
    session, _ = shake_hands(harness.endpoint(), purpose=PURPOSE)
    session.stream.sendall(session.frame(UploadFile("a/file", 1000)) + b"half of it")
    assert member.echo_s() < PATIENCE_S
    session.stream.close()
    member.client.close()


# Files that take long.

SILENCE_S = 1.0
BOTH_WAYS = pytest.mark.parametrize("way", ["upload", "download"])


@pytest.fixture
def impatient(kept: Path) -> Iterator[ServerHarness]:
    """A coordinator that waits a second for a byte, and has a file."""
    (kept / "a").mkdir(parents=True)
    (kept / "a" / "file").write_bytes(BYTES)
    made = ServerHarness(0, FileCoordinator(kept, SILENCE_S))
    yield made
    made.close()


def transfer(way: str, sender: FileTransfer, own: Path, kept: Path, pulse: Callable[[int], object] = lambda num: None) -> bytes:
    """Transfer the bytes that way, and return those that have come."""
    if way == "download":
        return sender.download("a/file", read_all, pulse)
    sender.upload(own, "a/new", pulse)
    return (kept / "a" / "new").read_bytes()


def send_slowly(monkeypatch: pytest.MonkeyPatch, pauses_s: list[float]) -> None:
    """Let whoever sends a file pause before each of its first parts; a negative pause cuts the connection."""
    real = file_transfer._Link.send

    def send(link: file_transfer._Link, block: bytes) -> None:
        while len(block) > 1000 and pauses_s:
            if (pause_s := pauses_s.pop(0)) < 0:
                raise ConnectionResetError("cut")
            time.sleep(pause_s)
            real(link, block[:1000])
            block = block[1000:]
        real(link, block)

    monkeypatch.setattr(file_transfer._Link, "send", send)


@BOTH_WAYS
def test_a_slow_transfer_takes_longer_than_any_deadline_as_long_as_bytes_move(
    way: str, impatient: ServerHarness, own: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_slowly(monkeypatch, [SILENCE_S / 10] * 13)
    sender = FileTransfer(impatient.endpoint(), timeout_s=0.0, silence_s=SILENCE_S)
    begin_s, moved = time.monotonic(), []
    assert transfer(way, sender, own, kept, moved.append) == BYTES
    assert time.monotonic() - begin_s > SILENCE_S
    assert sum(moved) >= len(BYTES)


@BOTH_WAYS
def test_a_transfer_that_is_cut_after_a_long_time_is_tried_again(
    way: str, impatient: ServerHarness, own: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_slowly(monkeypatch, [0.3, 0.3, -1])
    sender = FileTransfer(impatient.endpoint(), timeout_s=0.25, silence_s=SILENCE_S)
    assert transfer(way, sender, own, kept) == BYTES


@BOTH_WAYS
def test_a_transfer_that_is_cut_at_the_same_point_again_and_again_is_an_error_in_the_end(
    way: str, impatient: ServerHarness, own: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_slowly(monkeypatch, [0.0, -1.0] * 1000)
    with pytest.raises(FileProblem, match=f"cannot {way} a/.* the coordinator: (cut|.*disconnected)"):
        transfer(way, FileTransfer(impatient.endpoint(), timeout_s=0.5), own, kept)


def test_a_worker_that_sends_nothing_more_is_cut_and_told_so(kept: Path, own: Path) -> None:
    harness = ServerHarness(0, FileCoordinator(kept, 0.1))
    session, _ = shake_hands(harness.endpoint(), purpose=PURPOSE)
    session.stream.sendall(session.frame(UploadFile("a/file", 1000)) + b"half of it")
    answers = [session.reader.receive(session.stream.recv, "closed") for _ in range(2)]
    assert answers == [FileContent(), FileContent(problem="file was given up: no byte came or went for 0.1 s")]
    assert session.stream.recv(1) == b""
    assert list((kept / "a").iterdir()) == []
    harness.close()


def test_a_coordinator_that_sends_nothing_more_is_an_error_in_the_end(
    impatient: ServerHarness, own: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_slowly(monkeypatch, [0.0, 0.5])
    sender = FileTransfer(impatient.endpoint(), timeout_s=0.0, silence_s=0.1)
    with pytest.raises(FileProblem, match=r"cannot download a/file from the coordinator: no byte came or went for 0\.1 s"):
        transfer("download", sender, own, kept)


def test_a_transfer_ends_at_once_when_it_is_not_wanted_any_more(impatient: ServerHarness, own: Path, kept: Path) -> None:
    def over(num_bytes: int) -> None:
        raise KeyError("the epoch is over")

    with pytest.raises(KeyError, match="the epoch is over"):
        transfer("download", FileTransfer(impatient.endpoint()), own, kept, over)


def test_the_disk_of_a_worker_has_no_part_in_what_it_downloads(impatient: ServerHarness, full_disk: None) -> None:
    assert FileTransfer(impatient.endpoint()).download("a/file", read_all) == BYTES


# More transfers than can be served at once.


@pytest.fixture
def busy(kept: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ServerHarness, Callable[[], None]]]:
    """A coordinator that serves one transfer at a time and has one, and a function that ends that one."""
    monkeypatch.setattr(server, "_WAITING_S", 0.05)
    monkeypatch.setattr(server, "_HANDSHAKE_S", 0.1)  # who waits for long is not late
    harness = ServerHarness(0, FileCoordinator(kept), most_tasks=1)
    session, _ = shake_hands(harness.endpoint(), purpose=PURPOSE)
    session.stream.sendall(session.frame(UploadFile("a/first", 1000)) + b"half of it")
    yield harness, session.stream.close
    session.stream.close()
    harness.close()


def test_too_many_transfers_wait_for_their_turn(busy: tuple[ServerHarness, Callable[[], None]], own: Path, kept: Path) -> None:
    harness, end_first = busy
    waited, ended = threading.Event(), []

    def upload(number: int) -> None:
        moved: list[int] = []
        FileTransfer(harness.endpoint(), timeout_s=0.0).upload(own, f"a/{number}", lambda num: moved.append(num) or waited.set())
        ended.append(number)

    threads = [threading.Thread(target=upload, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    assert waited.wait(PATIENCE_S)
    member = harness.member("W0_0")
    assert member.echo_s() < PATIENCE_S
    time.sleep(0.3)
    assert ended == []
    end_first()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(ended) == [0, 1, 2]
    assert [(kept / "a" / f"{number}").read_bytes() == BYTES for number in range(3)] == [True] * 3
    member.client.close()


def test_who_waits_too_long_for_a_transfer_is_told_why(busy: tuple[ServerHarness, Callable[[], None]], own: Path) -> None:
    harness, _ = busy
    harness.server._queue_s = 1.0
    reason = (
        "cannot upload a/file to the coordinator: it has waited 1 s for its file_transfer: 1 other connections are served first"
    )
    with pytest.raises(FileProblem, match=reason):
        FileTransfer(harness.endpoint()).upload(own, "a/file")


def test_who_leaves_while_it_waits_keeps_nobody_from_its_turn(
    busy: tuple[ServerHarness, Callable[[], None]], own: Path, kept: Path
) -> None:
    harness, end_first = busy

    def leave(num_bytes: int) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        FileTransfer(harness.endpoint()).upload(own, "a/second", leave)
    end_first()
    FileTransfer(harness.endpoint()).upload(own, "a/third")
    assert (kept / "a" / "third").read_bytes() == BYTES


class UncertainCoordinator(FileCoordinator):
    """A coordinator that may not lead any more, and refuses to serve files."""

    num_asked = 0

    def task_for(self, hello: Hello) -> ConnectionTask | Refused:
        self.num_asked += 1
        return Refused("it is not certain that this coordinator leads", tries_again=True)


def test_a_coordinator_that_may_not_lead_is_passed_over_and_the_one_that_served_is_asked_first(
    harness: ServerHarness, kept: Path, own: Path, tmp_path: Path
) -> None:
    stale = UncertainCoordinator(tmp_path / "stale")
    other = ServerHarness(0, stale)
    sender = FileTransfer(replace(other.endpoint(), others=(("127.0.0.1", harness.port),)), timeout_s=PATIENCE_S)
    sender.upload(own, "a/first")
    assert sender.download("a/first", read_all) == BYTES
    assert (kept / "a/first").read_bytes() == BYTES
    assert stale.num_asked == 1
    assert not (tmp_path / "stale").exists()
    other.close()


def test_a_coordinator_that_never_becomes_certain_is_given_up(own: Path, tmp_path: Path) -> None:
    alone = ServerHarness(0, UncertainCoordinator(tmp_path / "stale"))
    with pytest.raises(FileProblem, match="it is not certain that this coordinator leads"):
        FileTransfer(alone.endpoint(), timeout_s=0.5).upload(own, "a/file")
    alone.close()
