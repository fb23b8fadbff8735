"""The server and its members: limits, disconnections, calls from other threads, and the last messages."""

import os
import struct
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from statistics import median

import pytest

from recycle.control.decide.messages import JobEnded, RenewLease, StoreEntry, Welcome
from recycle.control.net.listener import listen
from recycle.control.net.wire import MOST_BYTES
from recycle.core.errors import PortInUse, UserError
from tests.control.net.endpoint_harness import LEASE_S, PATIENCE_S, FakeMember, ServerHarness
from tests.processes import depends_on_load

pytestmark = pytest.mark.timeout(60)
OF_NOBODY = "192.0.2.1"  # an address for documents


def test_an_address_of_another_machine_is_refused_without_blame_for_another_program() -> None:
    with pytest.raises(
        UserError, match=rf"^{OF_NOBODY} is no address of this machine: listen on one of its own, or on "
    ) as caught:
        listen(OF_NOBODY, 0)
    assert not isinstance(caught.value, PortInUse)
    assert "program" not in str(caught.value)


def test_a_member_may_send_longer_messages_than_an_unproved_connection(harness: ServerHarness, member: FakeMember) -> None:
    much = StoreEntry(1, "key", "x" * 3_000_000)
    assert member.client.send(much)
    assert member.next(StoreEntry) == much


def test_a_member_that_sends_a_too_long_message_is_disconnected_alone(harness: ServerHarness, member: FakeMember) -> None:
    worker = harness.connect()
    worker.stream.sendall(worker.hello())
    assert isinstance(worker.next(), Welcome)
    worker.stream.sendall(struct.pack(">I", MOST_BYTES + 1))
    assert worker.next() is None
    worker.stream.close()
    harness.callbacks.wait_for(lambda: harness.callbacks.num_disconnected == 1)
    harness.callbacks.num_disconnected = 0


def test_a_member_that_does_not_read_delays_no_other(harness: ServerHarness, member: FakeMember) -> None:
    worker = harness.connect()
    worker.stream.sendall(worker.hello())
    assert isinstance(worker.next(), Welcome)
    (connection,) = [connection for connection, number in harness.callbacks.numbers.items() if number == 2]
    for _ in range(20):
        harness.server.call_soon(lambda: harness.server.send(connection, StoreEntry(1, "key", "x" * 1_000_000)))
    took_s = median(member.echo_s() for _ in range(21))
    with depends_on_load():
        assert took_s < LEASE_S / 2
    for _ in range(20):
        assert isinstance(worker.next(), StoreEntry)  # all of it comes when the member reads again
    worker.stream.close()
    harness.callbacks.wait_for(lambda: harness.callbacks.num_disconnected == 1)
    harness.callbacks.num_disconnected = 0


def test_a_connection_that_closes_is_known_at_once(harness: ServerHarness) -> None:
    worker = harness.connect()
    worker.stream.sendall(worker.hello())
    assert isinstance(worker.next(), Welcome)
    start_s = time.monotonic()
    worker.stream.close()
    harness.callbacks.wait_for(lambda: harness.callbacks.num_disconnected == 1)
    with depends_on_load():
        assert time.monotonic() - start_s < LEASE_S / 2


def test_a_connection_that_the_server_closes_is_not_reported_as_disconnected(harness: ServerHarness) -> None:
    worker = harness.connect()
    worker.stream.sendall(worker.hello())
    assert isinstance(worker.next(), Welcome)
    (connection,) = harness.callbacks.numbers
    harness.server.call_soon(lambda: harness.server.disconnect(connection))
    assert worker.next() is None
    assert harness.callbacks.num_disconnected == 0
    worker.stream.close()


def test_any_thread_may_have_a_function_called_and_it_is_called_at_once(harness: ServerHarness) -> None:
    done: SimpleQueue[str] = SimpleQueue()
    start_s = time.monotonic()
    for _ in range(100):
        harness.server.call_soon(lambda: done.put(threading.current_thread().name))
    names = {done.get(timeout=PATIENCE_S) for _ in range(100)}
    assert len(names) == 1
    assert threading.current_thread().name not in names
    with depends_on_load():
        assert time.monotonic() - start_s < LEASE_S / 2


def test_a_call_after_the_end_writes_into_no_other_file(tmp_path: Path) -> None:
    harness = ServerHarness()
    harness.close()
    with ExitStack() as stack:
        files = [stack.enter_context((tmp_path / str(number)).open("wb")) for number in range(10)]
        for _ in range(10):
            harness.server.call_soon(lambda: None)
        assert {os.fstat(stream.fileno()).st_size for stream in files} == {0}


def test_the_last_message_is_received_although_the_server_ends_and_the_worker_sends_on(harness: ServerHarness) -> None:
    """If the end of the job were lost, the worker would reconnect for ever."""
    is_closed, has_renewed = threading.Event(), threading.Event()
    end = threading.Event()

    def heartbeat() -> RenewLease:
        if end.is_set():
            has_renewed.set()
            assert is_closed.wait(PATIENCE_S)  # it sends into a connection that the other side has closed
        return RenewLease()

    other = ServerHarness()
    fake = FakeMember(other.endpoint(), "W0_0", heartbeat)
    fake.client.join(PATIENCE_S)
    end.set()
    assert has_renewed.wait(PATIENCE_S)

    def send_the_end() -> None:
        other.server.send(1, JobEnded("the job is done"))
        other.server.stop()

    for number in range(50):  # some of them are not read any more
        fake.client.send(RenewLease(number))
    other.server.call_soon(send_the_end)
    other._thread.join(PATIENCE_S)
    is_closed.set()
    assert fake.next(JobEnded) == JobEnded("the job is done")
    fake.client.close()


def test_all_pending_messages_are_sent_before_the_server_ends(harness: ServerHarness) -> None:
    other = ServerHarness()
    worker = other.connect()
    worker.stream.sendall(worker.hello())
    assert isinstance(worker.next(), Welcome)

    def send_much() -> None:
        other.server.send(1, StoreEntry(1, "key", "x" * 5_000_000))
        other.server.send(1, JobEnded("the job is done"))
        other.server.stop()

    other.server.call_soon(send_much)
    assert isinstance(worker.next(), StoreEntry)
    assert worker.next() == JobEnded("the job is done")
    assert worker.next() is None
    worker.stream.close()
    other.close()
