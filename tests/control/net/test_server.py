"""The coordinator's port for members: what they may say, who notices when one is gone, and what is heard when it closes."""

import os
import struct
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

import pytest

from recycle.control.decide.messages import JobEnded, RenewLease, StoreEntry, Welcome
from recycle.control.net.wire import MOST_BYTES
from tests.control.net.endpoint_harness import LEASE_S, PATIENCE_S, Guest, Post

pytestmark = pytest.mark.timeout(60)


def test_a_member_may_say_much_more_than_a_stranger(post: Post, member: Guest) -> None:
    much = StoreEntry(1, "key", "x" * 3_000_000)
    assert member.client.send(much)
    assert member.next(StoreEntry) == much


def test_a_member_that_says_too_much_is_lost_and_nobody_else(post: Post, member: Guest) -> None:
    worker = post.stranger()
    worker.stream.sendall(worker.hello())
    assert isinstance(worker.next(), Welcome)
    worker.stream.sendall(struct.pack(">I", MOST_BYTES + 1))
    assert worker.next() is None
    worker.stream.close()
    post.porter.wait_for(lambda: post.porter.num_lost == 1)
    post.porter.num_lost = 0


def test_a_member_that_does_not_listen_holds_up_nobody(post: Post, member: Guest) -> None:
    worker = post.stranger()
    worker.stream.sendall(worker.hello())
    assert isinstance(worker.next(), Welcome)
    (caller,) = [caller for caller, number in post.porter.numbers.items() if number == 2]
    for _ in range(20):
        post.server.call(lambda: post.server.send(caller, StoreEntry(1, "key", "x" * 1_000_000)))
    assert max(member.echo_s() for _ in range(20)) < LEASE_S / 2
    for _ in range(20):
        assert isinstance(worker.next(), StoreEntry)  # all of it comes when it listens again
    worker.stream.close()
    post.porter.wait_for(lambda: post.porter.num_lost == 1)
    post.porter.num_lost = 0


def test_a_connection_that_closes_is_known_at_once(post: Post) -> None:
    worker = post.stranger()
    worker.stream.sendall(worker.hello())
    assert isinstance(worker.next(), Welcome)
    start_s = time.monotonic()
    worker.stream.close()
    post.porter.wait_for(lambda: post.porter.num_lost == 1)
    assert time.monotonic() - start_s < LEASE_S / 2


def test_whoever_is_hung_up_on_is_not_told_of_as_lost(post: Post) -> None:
    worker = post.stranger()
    worker.stream.sendall(worker.hello())
    assert isinstance(worker.next(), Welcome)
    (caller,) = post.porter.numbers
    post.server.call(lambda: post.server.hang_up(caller))
    assert worker.next() is None
    assert post.porter.num_lost == 0
    worker.stream.close()


def test_any_thread_may_have_something_done_and_it_is_done_at_once(post: Post) -> None:
    done: SimpleQueue[str] = SimpleQueue()
    start_s = time.monotonic()
    for _ in range(100):
        post.server.call(lambda: done.put(threading.current_thread().name))
    names = {done.get(timeout=PATIENCE_S) for _ in range(100)}
    assert len(names) == 1
    assert threading.current_thread().name not in names
    assert time.monotonic() - start_s < LEASE_S / 2


def test_who_calls_after_the_end_writes_into_nobody_elses_file(tmp_path: Path) -> None:
    post = Post()
    post.close()
    with ExitStack() as stack:
        files = [stack.enter_context((tmp_path / str(number)).open("wb")) for number in range(10)]
        for _ in range(10):
            post.server.call(lambda: None)
        assert {os.fstat(stream.fileno()).st_size for stream in files} == {0}


def test_what_was_said_last_is_heard_although_the_server_ends_and_the_worker_talks_on(post: Post) -> None:
    """An end that is lost would leave a worker knocking at a closed door for ever."""
    is_closed, has_pulsed = threading.Event(), threading.Event()
    end = threading.Event()

    def pulse() -> RenewLease:
        if end.is_set():
            has_pulsed.set()
            assert is_closed.wait(PATIENCE_S)  # it says something into a connection that the other side has closed
        return RenewLease()

    other = Post()
    guest = Guest(other.door(), "W0_0", pulse)
    guest.client.join(PATIENCE_S)
    end.set()
    assert has_pulsed.wait(PATIENCE_S)

    def say_last_words() -> None:
        other.server.send(1, JobEnded("the job is done"))
        other.server.stop()

    for number in range(50):  # some of them are not read any more
        guest.client.send(RenewLease(number))
    other.server.call(say_last_words)
    other._thread.join(PATIENCE_S)
    is_closed.set()
    assert guest.next(JobEnded) == JobEnded("the job is done")
    guest.client.close()


def test_all_that_was_said_is_sent_before_the_server_ends(post: Post) -> None:
    other = Post()
    worker = other.stranger()
    worker.stream.sendall(worker.hello())
    assert isinstance(worker.next(), Welcome)

    def say_much() -> None:
        other.server.send(1, StoreEntry(1, "key", "x" * 5_000_000))
        other.server.send(1, JobEnded("the job is done"))
        other.server.stop()

    other.server.call(say_much)
    assert isinstance(worker.next(), StoreEntry)
    assert worker.next() == JobEnded("the job is done")
    assert worker.next() is None
    worker.stream.close()
    other.close()
