"""TLS on the control connection: both sides show a certificate of the job's authority, or are refused with the reason."""

import argparse
import datetime
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from recycle.cli.machines.endpoint_flags import read_tls
from recycle.control.decide.messages import StoreEntry, Welcome
from recycle.control.net import handshake, server
from recycle.control.net.file_transfer import FileTransfer, _Link
from recycle.control.net.handshake import Endpoint, JoinRefused
from recycle.control.net.tls import TlsFiles
from recycle.control.net.wire import FrameReader, Seal, Session
from recycle.core.errors import FileProblem
from tests.control.net.endpoint_harness import JOB, LEASE_S, PATIENCE_S, TOKEN, FakeMember, ServerHarness
from tests.control.net.test_client import Tap
from tests.control.net.test_file_transfer import BYTES, FileCoordinator, read_all
from tests.processes import depends_on_load
from tests.tls_files import FOREIGN, OURS, write_tls

pytestmark = pytest.mark.timeout(60)
LONG_AGO = {
    "not_before": datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
    "not_after": datetime.datetime(2020, 2, 1, tzinfo=datetime.UTC),
}
Make = Callable[..., TlsFiles]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes the files of one side: its certificate is for this machine's address, unless another name is given."""

    def write(by: trustme.CA = OURS, name: str = "127.0.0.1", folder: str = "", **times: datetime.datetime) -> TlsFiles:
        return write_tls(tmp_path / (folder or os.urandom(4).hex()), name, by=by, **times)

    return write


@pytest.fixture
def tls_harness(make: Make, tmp_path: Path) -> Iterator[ServerHarness]:
    made = ServerHarness(0, FileCoordinator(tmp_path / "kept"), tls=make(folder="coordinator"))
    yield made
    made.close()


def join(endpoint: Endpoint, tls: TlsFiles | None) -> FakeMember:
    fake = FakeMember(replace(endpoint, tls=tls))
    fake.client.join(PATIENCE_S)
    return fake


def test_a_worker_joins_and_sends_and_receives_messages_of_any_size(tls_harness: ServerHarness, make: Make) -> None:
    fake = join(tls_harness.endpoint(), make(name="worker"))
    fake.echo_s()
    large = StoreEntry(1, "large", "x" * 5_000_000)
    fake.client.send(large)
    assert fake.next(StoreEntry) == large
    for number in range(50):
        fake.client.report({"number": number})
    assert fake.client.wait_until_acknowledged(PATIENCE_S)
    fake.client.close()


def test_a_file_is_uploaded_and_downloaded(tls_harness: ServerHarness, make: Make, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_bytes(BYTES)
    transfer = FileTransfer(replace(tls_harness.endpoint(), tls=make(name="worker")))
    transfer.upload(own, "a/file")
    assert transfer.download("a/file", read_all) == BYTES


def test_messages_cannot_be_read_on_their_way(tls_harness: ServerHarness, make: Make) -> None:
    tap = Tap(tls_harness.port)
    fake = FakeMember(Endpoint("127.0.0.1", tap.port, TOKEN, JOB, make(name="worker")), "W0_0")
    fake.client.join(PATIENCE_S)
    fake.echo_s()
    fake.client.close()
    tap.close()
    assert len(tap.bytes) > 1000
    assert b"W0_0" not in tap.bytes


@pytest.mark.parametrize(
    ("coordinator", "worker", "reason"),
    [
        ({}, {"by": FOREIGN}, "refuses the certificate of this worker: unknown ca"),
        ({}, LONG_AGO, "refuses the certificate of this worker: certificate expired"),
        ({"by": FOREIGN}, {}, "the certificate of the coordinator at .* is refused: (self|unable)"),
        (LONG_AGO, {}, "the certificate of the coordinator at .* is refused: certificate has expired"),
        ({"name": "elsewhere"}, {}, "the certificate of the coordinator at .* is refused: IP address mismatch"),
    ],
    ids=["foreign worker", "expired worker", "foreign coordinator", "expired coordinator", "another machine's"],
)
def test_a_wrong_certificate_is_refused_and_named(coordinator: dict, worker: dict, reason: str, make: Make) -> None:  # type: ignore[type-arg]
    harness = ServerHarness(0, tls=make(**coordinator))
    with pytest.raises(JoinRefused, match=reason):
        join(harness.endpoint(), make(**{"name": "worker", **worker}))
    assert harness.callbacks.hellos == []
    harness.close()


def test_a_worker_without_a_certificate_is_refused(tls_harness: ServerHarness, make: Make) -> None:
    context = ssl.create_default_context(cafile=str(make().ca))
    with (
        socket.create_connection(("127.0.0.1", tls_harness.port), PATIENCE_S) as stream,
        pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"),
        context.wrap_socket(stream, server_hostname="127.0.0.1") as secured,
    ):
        secured.recv(100)


def test_the_token_is_needed_in_spite_of_a_certificate(tls_harness: ServerHarness, make: Make) -> None:
    with pytest.raises(JoinRefused, match="this is not the job's token"):
        join(tls_harness.endpoint(token="another"), make(name="worker"))


def test_a_worker_with_tls_is_told_that_the_coordinator_has_none(harness: ServerHarness, make: Make) -> None:
    with pytest.raises(JoinRefused, match=r"what listens at 127\.0\.0\.1:\d+ does not use TLS"):
        join(harness.endpoint(), make(name="worker"))


def test_a_worker_without_tls_is_told_that_the_coordinator_may_have_it(
    tls_harness: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server._HANDSHAKE_S < handshake._CONNECT_S / 1.5
    monkeypatch.setattr(server, "_HANDSHAKE_S", 0.1)
    with pytest.raises(ConnectionError, match="if the coordinator uses TLS, give --tls-cert"):
        handshake.shake_hands(tls_harness.endpoint())


def test_a_renewed_certificate_is_used_and_one_that_is_half_written_is_not(tls_harness: ServerHarness, make: Make) -> None:
    worker = make(name="worker")
    first = join(tls_harness.endpoint(), worker)
    files = make(folder="coordinator", by=FOREIGN)
    with pytest.raises(JoinRefused, match="the certificate of the coordinator"):
        join(tls_harness.endpoint(), worker)
    files = make(folder="coordinator")
    second = join(tls_harness.endpoint(), worker)
    files.cert.write_bytes(files.cert.read_bytes()[:100])
    third = join(tls_harness.endpoint(), worker)
    for fake in (first, second, third):
        fake.echo_s()
        fake.client.close()


def test_a_certificate_that_is_renewed_by_a_link_is_used(make: Make, tmp_path: Path) -> None:
    make(folder="first")
    make(folder="second", by=FOREIGN)
    link = tmp_path / "link"
    link.symlink_to("first")
    given = argparse.Namespace(**{f"tls_{name}": link / f"{name}.pem" for name in ("cert", "key", "ca")})
    files = read_tls(given)
    harness, worker = ServerHarness(0, tls=files), make(name="worker")
    join(harness.endpoint(), worker).client.close()
    (tmp_path / "new").symlink_to("second")
    (tmp_path / "new").rename(link)
    with pytest.raises(JoinRefused, match="the certificate of the coordinator"):
        join(harness.endpoint(), worker)
    harness.close()


def test_a_worker_reconnects_when_its_own_certificate_has_been_renewed(make: Make) -> None:
    harness = ServerHarness(0, tls=make())
    files = make(name="worker", folder="worker")
    fake = join(harness.endpoint(), files)
    files.key.write_text("half of a k")
    harness.server.call_soon(lambda: harness.server.disconnect(1))
    time.sleep(0.5)  # it tries, and cannot
    assert fake.refusals.empty()
    make(name="worker", folder="worker")
    fake.next(Welcome)
    fake.next(Welcome)
    fake.client.close()
    harness.close()


def test_a_slow_transfer_is_not_cut_as_long_as_bytes_move(make: Make) -> None:
    """The other side takes 20 kB at once, and pauses: less than the file in the time that a transfer may be silent."""
    ours, theirs = socket.socketpair()
    for stream in (ours, theirs):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)

    def read_slowly() -> None:
        with make().server_context().wrap_socket(theirs, server_side=True) as slow:
            while slow.recv(20_000):
                time.sleep(0.05)

    reading = threading.Thread(target=read_slowly, daemon=True)
    reading.start()
    moved: list[int] = []
    with make(name="worker").client_context().wrap_socket(ours, server_hostname="127.0.0.1") as secured:
        session = Session(secured, FrameReader(1000), Seal("", ""))
        begin_s = time.monotonic()
        _Link(session, 0.5, moved.append).send(BYTES[:600_000])
        assert time.monotonic() - begin_s > 0.5
    reading.join(PATIENCE_S)
    assert sum(moved) == 600_000


def test_bytes_that_are_no_tls_disturb_no_member(tls_harness: ServerHarness, make: Make) -> None:
    member = join(tls_harness.endpoint(), make(name="worker"))
    for size in (1, 5, 100, 5000, 100_000):
        with socket.create_connection(("127.0.0.1", tls_harness.port), PATIENCE_S) as stream:
            try:
                stream.sendall(b"\x16\x03\x01" + os.urandom(size))
                stream.shutdown(socket.SHUT_WR)
                while stream.recv(1 << 16):
                    pass
            except OSError:
                pass  # it is closed before all is read
        took_s = member.echo_s()
        with depends_on_load():
            assert took_s < LEASE_S
    member.client.close()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda files: files.cert.write_text("nonsense"), "cannot use the certificate in .*cert.pem with the key in"),
        (lambda files: files.key.unlink(), "cannot use the certificate in .*: No such file"),
        (lambda files: files.ca.write_text(""), "cannot use the authority in .*ca.pem"),
    ],
    ids=["no certificate", "no key", "no authority"],
)
def test_files_that_cannot_be_used_are_named(spoil: Callable[[TlsFiles], None], reason: str, make: Make) -> None:
    files = make()
    spoil(files)
    with pytest.raises(FileProblem, match=reason):
        files.client_context()
    with pytest.raises(FileProblem, match=reason):
        files.server_context()


def test_a_key_of_another_certificate_is_refused(make: Make) -> None:
    with pytest.raises(FileProblem, match=r"cannot use the certificate .*: key values mismatch"):
        replace(make(), key=make().key).client_context()
