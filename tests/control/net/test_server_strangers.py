"""The coordinator's port: only who has the token gets in, all others get a reason, and no member is ever the worse for it."""

import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from recycle.control.decide.messages import Challenge, Report, StopEpoch, Welcome
from recycle.control.net import handshake as knock
from recycle.control.net import server
from recycle.control.net.handshake import JoinRefused
from recycle.control.net.wire import encode_frame
from recycle.core.release import RELEASE
from tests.control.net.endpoint_harness import LEASE_S, PATIENCE_S, Guest, Post, Stranger

pytestmark = pytest.mark.timeout(60)


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
    body = b'{"type":"stopped","epoch":1,"standing":{"num_steps":1,"own":{"iteration":1,"norms":[1' + b"0" * 400 + b"]}}}"
    stranger.stream.sendall(struct.pack(">I", len(body)) + body)


def another_first_word(stranger: Stranger) -> None:
    stranger.stream.sendall(encode_frame(StopEpoch(1)))


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


def test_the_challenge_is_another_one_for_everybody(post: Post) -> None:
    strangers = [post.stranger() for _ in range(5)]
    said = [stranger.next() for stranger in strangers]
    for stranger in strangers:
        stranger.stream.close()
    assert len({message.nonce for message in said if isinstance(message, Challenge)}) == 5


def test_nobody_is_heard_before_it_is_let_in(post: Post, member: Guest) -> None:
    stranger = post.stranger()
    stranger.stream.sendall(encode_frame(Report(1, {})))
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
        except JoinRefused as problem:
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
    with pytest.raises(JoinRefused, match=rf"the worker is of release 9\.9, but the job runs {RELEASE}"):
        Guest(post.door()).client.join(PATIENCE_S)
