"""The coordinator's port: only who has the token gets in, all others get a reason, and no member is ever the worse for it."""

import json
import os
import random
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

import pytest

from recycle.control import knock, server
from recycle.control.client import Client
from recycle.control.knock import Door, TurnedAway
from recycle.control.messages import Challenge, End, Heard, Hello, Message, Refused, Renew, Share, Stop, Tell, Welcome
from recycle.control.server import Server, listen
from recycle.control.wire import MOST_BYTES, Inbox, framed, proof
from recycle.core.release import RELEASE

pytestmark = pytest.mark.timeout(60)
TOKEN, JOB, LEASE_S, PATIENCE_S = "the job's own secret", "a1b2c3d4", 2.0, 10.0


def num_open() -> int:
    """How many files and sockets this process holds."""
    return len(list(Path("/proc/self/fd").iterdir()))


class Porter:
    """An actor that lets in whoever wants a free place, gives back what is shared, and remembers what it saw."""

    def __init__(self) -> None:
        self.server: Server
        self.numbers: dict[int, int] = {}
        self.seats: dict[int, str] = {}
        self.hellos: list[Hello] = []
        self.heard: list[Message] = []
        self.num_lost = 0
        self.fenced: set[int] = set()
        self.is_hearing = True
        self.changed = threading.Condition()

    def admit(self, caller: int, hello: Hello) -> Welcome | Refused:
        with self.changed:
            self.hellos.append(hello)
            if hello.job not in ("", JOB):
                return Refused(f"this is job {JOB}, not {hello.job}")
            if hello.member in self.fenced:
                return Refused("it was taken for dead, and others do its work")
            if hello.member < 0 and hello.seat and hello.seat in self.seats.values():
                return Refused(f"{hello.seat} is taken: another worker has come for it")
            number = hello.member if hello.member >= 0 else len(self.seats) + 1
            self.numbers[caller], self.seats[number] = number, hello.seat
            return Welcome("", number, LEASE_S, JOB)

    def entered(self, caller: int) -> None:
        with self.changed:
            self.changed.notify_all()

    def receive(self, caller: int, message: Message) -> None:
        if isinstance(message, Share):
            self.server.send(caller, message)
        if isinstance(message, Tell) and self.is_hearing:
            self.server.send(caller, Heard(message.number))
        with self.changed:
            self.heard.append(message)
            self.changed.notify_all()

    def lost(self, caller: int) -> None:
        with self.changed:
            self.num_lost += 1
            self.seats.pop(self.numbers.pop(caller), None)
            self.changed.notify_all()

    def tick(self) -> None:
        pass

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE_S)

    def told(self) -> list[int]:
        with self.changed:
            return [message.number for message in self.heard if isinstance(message, Tell)]


class Post:
    """A server in a thread of its own, on a port of this machine."""

    def __init__(self, port: int = 0, porter: Porter | None = None) -> None:
        self.porter = porter or Porter()
        listener = listen("127.0.0.1", port)
        self.port = listener.getsockname()[1]
        self.server = self.porter.server = Server(listener, TOKEN, self.porter)
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.call(self.server.stop)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def door(self, token: str = TOKEN, job: str = JOB) -> Door:
        return Door("127.0.0.1", self.port, token, job)

    def member(self, seat: str = "") -> "Guest":
        """A worker that is let in."""
        guest = Guest(self.door(), seat)
        guest.client.join(PATIENCE_S)
        return guest

    def stranger(self) -> "Stranger":
        return Stranger(self.port)


class Guest:
    """A worker's end, and what it heard."""

    def __init__(self, door: Door, seat: str = "", pulse: Callable[[], Renew] = Renew) -> None:
        self.heard: SimpleQueue[Message] = SimpleQueue()
        self.refusals: SimpleQueue[str] = SimpleQueue()
        self.client = Client(door, seat, self.heard.put, self.refusals.put, pulse)

    def next(self, kind: type[Message]) -> Message:
        while not isinstance(message := self.heard.get(timeout=PATIENCE_S), kind):
            pass
        return message

    def echo_s(self) -> float:
        """How long it takes to be heard and answered."""
        start_s, key = time.monotonic(), secrets.token_hex(4)
        assert self.client.send(Share(1, key, "x"))
        while self.next(Share) != Share(1, key, "x"):
            pass
        return time.monotonic() - start_s


class Stranger:
    """A bare connection to the port."""

    def __init__(self, port: int) -> None:
        self.stream = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        self._inbox, self._early = Inbox(MOST_BYTES), []  # type: ignore[var-annotated]

    def next(self) -> Message | None:
        """The next message, or None when the connection is closed."""
        while not self._early:
            try:
                some = self.stream.recv(1 << 16)
            except ConnectionResetError:
                some = b""
            if not some:
                return None
            self._early += self._inbox.take(some)
        return self._early.pop(0)

    def hello(self, token: str = TOKEN, **changes: object) -> bytes:
        """What a worker says to the challenge that it got, with changes."""
        challenge = self.next()
        assert isinstance(challenge, Challenge)
        told = {"type": "hello", "proof": proof(token, "worker", challenge.nonce), "release": RELEASE, "job": JOB}
        body = json.dumps({**told, "host": "there", "pid": 7, "nonce": "n", **changes}).encode()
        return struct.pack(">I", len(body)) + body

    def refusal(self) -> str:
        """Why the connection is closed."""
        said: list[Message] = []
        while (message := self.next()) is not None:
            said.append(message)
        self.stream.close()
        last = said[-1]
        assert isinstance(last, Refused)
        return last.reason


@pytest.fixture
def post() -> Iterator[Post]:
    """A port that has left nothing behind when it is closed."""
    before, threads = num_open(), threading.active_count()
    made = Post()
    yield made
    made.close()
    deadline_s = time.monotonic() + PATIENCE_S
    while (num_open(), threading.active_count()) != (before, threads):
        assert time.monotonic() < deadline_s, (
            f"{num_open() - before} files and {threading.active_count() - threads} threads are left"
        )
        time.sleep(0.01)


@pytest.fixture
def member(post: Post) -> Iterator[Guest]:
    """Somebody who has been let in, and notices nothing of whatever a test does to the port."""
    guest = post.member("W0_0")
    guest.echo_s()
    yield guest
    assert guest.echo_s() < LEASE_S / 2
    assert post.porter.num_lost == 0
    assert guest.refusals.empty()
    guest.client.close()
    post.porter.wait_for(lambda: post.porter.num_lost == 1)


# Who is refused, and why.


def wrong_token(stranger: Stranger) -> None:
    stranger.stream.sendall(stranger.hello(token="another secret"))


def no_token(stranger: Stranger) -> None:
    stranger.stream.sendall(stranger.hello(proof=""))


def a_number_for_a_proof(stranger: Stranger) -> None:
    stranger.stream.sendall(stranger.hello(proof=5))


def half_a_letter_for_a_proof(stranger: Stranger) -> None:
    stranger.stream.sendall(stranger.hello(proof="\ud800"))


def another_release(stranger: Stranger) -> None:
    stranger.stream.sendall(stranger.hello(release="0.0.9"))


def another_job(stranger: Stranger) -> None:
    stranger.stream.sendall(stranger.hello(job="deadbeef"))


def a_place_that_is_taken(stranger: Stranger) -> None:
    stranger.stream.sendall(stranger.hello(seat="W0_0"))


def a_web_browser(stranger: Stranger) -> None:
    stranger.stream.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")


def a_huge_length(stranger: Stranger) -> None:
    stranger.stream.sendall(struct.pack(">I", 0xFFFFFFFF))


def a_long_hello(stranger: Stranger) -> None:
    stranger.stream.sendall(stranger.hello(host="x" * 5000))


def no_json(stranger: Stranger) -> None:
    stranger.stream.sendall(struct.pack(">I", 8) + b"\x80\x03}q\x00X.\xff")


def a_number_that_is_too_large(stranger: Stranger) -> None:
    body = (
        b'{"type":"stopped","epoch":1,"standing":{"num_steps":1,"own":{"iteration":1,"norms":[1'
        + b"0" * 400
        + b'],"losses":[]}}}'
    )
    stranger.stream.sendall(struct.pack(">I", len(body)) + body)


def another_first_word(stranger: Stranger) -> None:
    stranger.stream.sendall(framed(Stop(1)))


REFUSED = {
    wrong_token: "this is not the job's token",
    no_token: "this is not the job's token",
    a_number_for_a_proof: "this is no message: TypeError",
    half_a_letter_for_a_proof: "this is not the job's token",
    another_release: f"the worker is of release 0.0.9, but the job runs {RELEASE}",
    another_job: "this is job a1b2c3d4, not deadbeef",
    a_place_that_is_taken: "W0_0 is taken: another worker has come for it",
    a_web_browser: "a message of 1195725856 bytes, where 4096 are the most",
    a_huge_length: "a message of 4294967295 bytes, where 4096 are the most",
    a_long_hello: "bytes, where 4096 are the most",
    no_json: "this is no message",
    a_number_that_is_too_large: "this is no message: OverflowError",
    another_first_word: "the first word must be a hello",
}


@pytest.mark.parametrize("intrude", REFUSED, ids=lambda intrude: intrude.__name__)
def test_who_does_not_belong_here_is_told_why_and_nobody_is_disturbed(
    intrude: Callable[[Stranger], None], post: Post, member: Guest
) -> None:
    for _ in range(3):
        stranger = post.stranger()
        intrude(stranger)
        assert REFUSED[intrude] in stranger.refusal()


def test_a_hello_that_was_overheard_opens_nothing(post: Post, member: Guest) -> None:
    worker, thief = post.stranger(), post.stranger()
    hello = worker.hello()
    worker.stream.sendall(hello)
    assert isinstance(worker.next(), Welcome)
    assert isinstance(thief.next(), Challenge)
    thief.stream.sendall(hello)
    assert thief.refusal() == "this is not the job's token"
    worker.stream.close()
    post.porter.wait_for(lambda: post.porter.num_lost == 1)
    post.porter.num_lost = 0


def test_nobody_is_heard_before_it_is_let_in(post: Post, member: Guest) -> None:
    stranger = post.stranger()
    stranger.stream.sendall(framed(Tell(1, {})))
    stranger.refusal()
    assert post.porter.told() == []


def test_random_bytes_close_their_own_connection_only(post: Post, member: Guest) -> None:
    dice = random.Random(5)
    for size in (1, 4, 5, 100, 5000, 300_000):
        stranger = post.stranger()
        try:
            stranger.stream.sendall(dice.randbytes(size))
            stranger.stream.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it was closed before it had said everything
        while stranger.next() is not None:
            pass
        stranger.stream.close()
        assert member.echo_s() < LEASE_S / 2


def test_a_crowd_of_strangers_does_not_keep_a_member_waiting(post: Post, member: Guest) -> None:
    dice, is_over = random.Random(7), threading.Event()

    def pester() -> None:
        while not is_over.is_set():
            try:
                with socket.create_connection(("127.0.0.1", post.port), PATIENCE_S) as stream:
                    stream.sendall(dice.randbytes(1000))
            except OSError:
                pass

    crowd = threading.Thread(target=pester, daemon=True)
    crowd.start()
    try:
        worst_s = max(member.echo_s() for _ in range(200))
    finally:
        is_over.set()
        crowd.join(PATIENCE_S)
    assert worst_s < LEASE_S / 2


@pytest.mark.parametrize("said", [b"", b"\x00\x00", struct.pack(">I", 1000) + b'{"type":'], ids=["nothing", "a little", "half"])
def test_who_says_too_little_is_sent_away_when_its_time_is_over(
    said: bytes, post: Post, member: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_STRANGER_S", 0.3)
    stranger = post.stranger()
    stranger.stream.sendall(said)
    start_s = time.monotonic()
    assert isinstance(stranger.next(), Challenge)
    assert stranger.next() is None
    assert time.monotonic() - start_s > 0.1
    stranger.stream.close()


def test_no_more_than_so_many_strangers_are_let_near_at_once(post: Post, member: Guest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_STRANGERS", 4)
    crowd = [post.stranger() for _ in range(4)]
    for stranger in crowd:
        assert isinstance(stranger.next(), Challenge)
    late = post.stranger()
    assert late.next() is None
    crowd.pop().stream.close()
    guest = post.member("W0_1")  # it knocks until there is room
    for stranger in [late, *crowd]:
        stranger.stream.close()
    guest.client.close()
    post.porter.wait_for(lambda: post.porter.num_lost == 1)
    post.porter.num_lost = 0


def test_two_workers_that_claim_one_place_at_once_are_one_too_many(post: Post) -> None:
    outcomes: SimpleQueue[object] = SimpleQueue()

    def claim() -> None:
        guest = Guest(post.door(), "W1_1")
        try:
            guest.client.join(PATIENCE_S)
        except TurnedAway as problem:
            outcomes.put(str(problem))
        else:
            outcomes.put(guest)

    for _ in range(2):
        threading.Thread(target=claim, daemon=True).start()
    got = {type(each): each for each in (outcomes.get(timeout=PATIENCE_S) for _ in range(2))}
    assert got[str] == "W1_1 is taken: another worker has come for it"
    winner = got[Guest]
    assert isinstance(winner, Guest)
    winner.client.close()
    post.porter.wait_for(lambda: post.porter.num_lost == 1)


def test_a_worker_of_another_release_is_turned_away_with_both_releases(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knock, "RELEASE", "9.9")
    with pytest.raises(TurnedAway, match=rf"the worker is of release 9\.9, but the job runs {RELEASE}"):
        Guest(post.door()).client.join(PATIENCE_S)


# What a member may do.


def test_a_member_may_say_much_more_than_a_stranger(post: Post, member: Guest) -> None:
    much = Share(1, "key", "x" * 3_000_000)
    assert member.client.send(much)
    assert member.next(Share) == much


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
        post.server.call(lambda: post.server.send(caller, Share(1, "key", "x" * 1_000_000)))
    assert max(member.echo_s() for _ in range(20)) < LEASE_S / 2
    for _ in range(20):
        assert isinstance(worker.next(), Share)  # all of it comes when it listens again
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

    def pulse() -> Renew:
        if end.is_set():
            has_pulsed.set()
            assert is_closed.wait(PATIENCE_S)  # it says something into a connection that the other side has closed
        return Renew()

    other = Post()
    guest = Guest(other.door(), "W0_0", pulse)
    guest.client.join(PATIENCE_S)
    end.set()
    assert has_pulsed.wait(PATIENCE_S)

    def say_last_words() -> None:
        other.server.send(1, End("the job is done"))
        other.server.stop()

    for number in range(50):  # some of them are not read any more
        guest.client.send(Renew(number))
    other.server.call(say_last_words)
    other._thread.join(PATIENCE_S)
    is_closed.set()
    assert guest.next(End) == End("the job is done")
    guest.client.close()


def test_all_that_was_said_is_sent_before_the_server_ends(post: Post) -> None:
    other = Post()
    worker = other.stranger()
    worker.stream.sendall(worker.hello())
    assert isinstance(worker.next(), Welcome)

    def say_much() -> None:
        other.server.send(1, Share(1, "key", "x" * 5_000_000))
        other.server.send(1, End("the job is done"))
        other.server.stop()

    other.server.call(say_much)
    assert isinstance(worker.next(), Share)
    assert worker.next() == End("the job is done")
    assert worker.next() is None
    worker.stream.close()
    other.close()


def test_the_challenge_is_another_one_for_everybody(post: Post) -> None:
    strangers = [post.stranger() for _ in range(5)]
    said = [stranger.next() for stranger in strangers]
    for stranger in strangers:
        stranger.stream.close()
    assert len({message.nonce for message in said if isinstance(message, Challenge)}) == 5
