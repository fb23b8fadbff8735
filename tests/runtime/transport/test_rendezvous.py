"""The rendezvous: an entry that one worker sets all can read; and no wait outlasts its epoch."""

import base64
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from recycle.core.cluster import Worker
from recycle.runtime.transport import rendezvous
from recycle.runtime.transport.gloo import GlooTransport
from recycle.runtime.transport.rendezvous import Rendezvous, make_unless_over, meet
from recycle.runtime.transport.specs import GroupView, TransportBroken
from tests.processes import depends_on_load
from tests.runtime.transport.worker_threads import PATIENCE_S, at_once, connected, rendezvous_of, transport_spec

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(60)
WORKERS = [Worker(0, 0), Worker(1, 0), Worker(0, 1)]
# A wait that ends with the epoch ends far sooner than one that runs into its time-out.
SOON_S = PATIENCE_S / 3


def nowhere(key, value):
    pass


def unanswered(keys):
    pass


def everybody():
    """Nobody is found that cannot be reached."""
    return ()


def test_an_entry_that_one_sets_all_others_can_read():
    one, *others = rendezvous_of(3)
    one.set("a", b"\x00\xff bytes")
    one.set("b", "words")
    for other in (one, *others):
        assert (other.get("a"), other.get("b")) == (b"\x00\xff bytes", b"words")
        assert other.check(["a", "b"])
        assert not other.check(["a", "c"])


def test_an_entry_is_text_that_any_message_can_carry():
    published = []
    Rendezvous(lambda key, value: published.append((key, value)), unanswered).set("e1/all/0", bytes(range(256)))
    assert json.loads(json.dumps(published)) == [["e1/all/0", base64.b64encode(bytes(range(256))).decode()]]


def test_own_entries_can_be_published_again_and_no_others_and_what_has_not_come_is_asked_for_again():
    published, asked = [], []
    store = Rendezvous(lambda key, value: published.append((key, value)), asked.append)
    store.set("own", "x")
    assert store.fetch(["own", "of another", "late"], 0.0) == ["of another", "late"]
    assert store.fetch(["late"], 0.0) == ["late"]  # it has asked for that
    store.add_entry("of another", base64.b64encode(b"y").decode())
    store.publish_again()
    assert published == [("own", base64.b64encode(b"x").decode())] * 2
    assert asked == [("of another", "late"), ("late",)]


def test_it_is_a_store_to_torch():
    one, other = rendezvous_of(2)
    dist.PrefixStore("e1/all", one).set("0", "an address")
    assert other.get("e1/all/0") == dist.PrefixStore("e1/all", other).get("0") == b"an address"


def test_whoever_waits_for_something_has_it_as_soon_as_it_is_set():
    one, other = rendezvous_of(2)
    found = at_once(lambda: other.get("a"), lambda: other.wait(["a", "b"]), lambda: [one.set(key, key) for key in ("b", "a")])
    assert found[0] == b"a"


def test_an_entry_that_nobody_sets_is_waited_for_no_longer_than_was_asked(monkeypatch):
    store = Rendezvous(nowhere, unanswered)
    store.set("a", "there")
    with pytest.raises(RuntimeError, match="no worker has set b"):
        store.wait(["a", "b"], timedelta(milliseconds=20))
    monkeypatch.setattr(rendezvous, "_DEFAULT_TIMEOUT", timedelta(milliseconds=20))
    with pytest.raises(RuntimeError, match="no worker has set c"):
        store.get("c")


def test_an_epoch_that_is_over_wakes_whoever_waits_and_lets_nobody_wait_again():
    store = Rendezvous(nowhere, unanswered)
    store.set("a", "there")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "b")
        store.abort()
        assert "the epoch is over" in str(waiting.exception(SOON_S))
    with pytest.raises(RuntimeError, match="the epoch is over"):
        store.wait(["a", "c"])
    assert store.get("a") == b"there"


def test_groups_find_each_other_by_it():
    with connected(WORKERS) as transports:
        peers = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]), torch.tensor([5.0, 6.0])]
        every = [torch.tensor([float(number)]) for number in (1, 2, 4)]

        def add(number):
            transports[number].reducer.all_reduce(peers[number])
            host = transports[number].host
            host.wait(host.begin_vote(every[number]), "all")

        at_once(*(lambda number=number: add(number) for number in range(3)))
    assert [value.tolist() for value in peers] == [[11.0, 22.0], [11.0, 22.0], [5.0, 6.0]]
    assert [value.tolist() for value in every] == [[7.0]] * 3


def test_an_epoch_that_ends_while_a_group_is_made_ends_the_making_at_once():
    # It sets its own address, and waits for those of the others, which never come.
    keys, is_there = [], threading.Event()

    def publish(key, value):
        keys.append(key)
        is_there.set()

    store = Rendezvous(publish, unanswered)
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(GlooTransport, store, GroupView(WORKERS[0], WORKERS, epoch=3), transport_spec())
        assert is_there.wait(PATIENCE_S)
        assert not making.done()
        began_s = time.monotonic()
        store.abort()
        problem = making.exception(PATIENCE_S)
        with depends_on_load():
            assert time.monotonic() - began_s < SOON_S
    assert isinstance(problem, TransportBroken)
    assert "the epoch is over" in str(problem)
    assert {key.split("/")[0] for key in keys} == {"e3"}


class Late:
    """A transport that is made when it is let, and notes what became of it."""

    def __init__(self):
        self.begun, self.let, self.calls, self.closed = threading.Event(), threading.Event(), [], threading.Event()

    def make(self):
        self.begun.set()
        assert self.let.wait(PATIENCE_S)
        return self

    def abort(self):
        self.calls.append("aborted")

    def close(self):
        self.calls.append("closed")
        self.closed.set()


def test_links_that_are_make_unless_over_are_used():
    late = Late()
    late.let.set()
    assert make_unless_over(late.make, Rendezvous(nowhere, unanswered), everybody) is late
    assert late.calls == []


def test_an_error_while_a_transport_is_made_is_raised_as_it_is():
    def fail():
        raise TransportBroken("the group all could not be made")

    with pytest.raises(TransportBroken, match="the group all could not be made"):
        make_unless_over(fail, Rendezvous(nowhere, unanswered), everybody)


def test_the_end_of_an_epoch_ends_the_wait_for_a_transport_and_one_that_is_made_too_late_is_aborted():
    late, store = Late(), Rendezvous(nowhere, unanswered)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(make_unless_over, late.make, store, everybody)
        assert late.begun.wait(PATIENCE_S)
        store.abort()
        assert isinstance(waiting.exception(SOON_S), TransportBroken)
    late.let.set()
    assert late.closed.wait(PATIENCE_S)
    assert late.calls == ["aborted", "closed"]


def test_no_transport_is_waited_for_in_an_epoch_that_is_over():
    late, store = Late(), Rendezvous(nowhere, unanswered)
    store.abort()
    with pytest.raises(TransportBroken, match="over before it began"):
        make_unless_over(late.make, store, everybody)
    late.let.set()


def test_a_transport_that_waits_for_a_worker_out_of_reach_is_given_up_and_the_worker_is_named():
    late, found = Late(), iter([(), ("W0_1", "W1_1")])
    with pytest.raises(TransportBroken, match="it cannot reach W0_1, W1_1") as problem:
        make_unless_over(late.make, Rendezvous(nowhere, unanswered), lambda: next(found), check_every_s=0.01)
    assert problem.value.unreachable == ("W0_1", "W1_1")
    late.let.set()
    assert late.closed.wait(PATIENCE_S)


def test_after_an_error_of_the_backend_the_worker_out_of_reach_is_named():
    def fail():
        raise TransportBroken("the group all could not be made: connect: Invalid argument")

    with pytest.raises(TransportBroken, match="it cannot reach W0_1") as problem:
        make_unless_over(fail, Rendezvous(nowhere, unanswered), lambda: ("W0_1",))
    assert problem.value.unreachable == ("W0_1",)


def test_all_meet_before_they_make_groups_however_late_one_of_them_comes(monkeypatch):
    monkeypatch.setattr(rendezvous, "_DEFAULT_TIMEOUT", timedelta(milliseconds=10))
    stores, came = rendezvous_of(2), []

    def come(number, late_s):
        time.sleep(late_s)
        came.append(number)
        meet(stores[number], GroupView(WORKERS[number], WORKERS[:2], epoch=3), "here")
        return list(came)

    assert at_once(lambda: come(0, 0.0), lambda: come(1, 0.3)) == [[0, 1], [0, 1]]


def test_nobody_is_met_any_more_when_the_epoch_is_over():
    store = Rendezvous(nowhere, unanswered)
    threading.Timer(0.1, store.abort).start()
    with pytest.raises(RuntimeError, match="the epoch is over"):
        meet(store, GroupView(WORKERS[0], WORKERS[:2], epoch=3), "here")
