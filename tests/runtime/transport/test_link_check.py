"""The link check: a worker that has published its port is reached there, or named; one that has not is not judged."""

import threading

import pytest

from recycle.core.cluster import Worker
from recycle.runtime.transport.links.link_check import LinkCheck, unreachable
from recycle.runtime.transport.rendezvous import ready_key
from tests.runtime.transport.worker_threads import rendezvous_of

pytestmark = pytest.mark.timeout(60)
OTHERS = [Worker(0, 1), Worker(1, 0), Worker(1, 1)]


def test_only_a_worker_that_has_published_its_port_and_does_not_answer_is_out_of_reach():
    own, *stores = rendezvous_of(3)
    reached, gone = LinkCheck("127.0.0.1"), LinkCheck("127.0.0.1")
    stores[0].set(ready_key(OTHERS[0]), reached.address)
    stores[1].set(ready_key(OTHERS[1]), gone.address)
    assert unreachable(own, OTHERS, OTHERS) == ()
    gone.close()
    for _ in range(200):  # more than connections wait until somebody accepts them
        assert unreachable(own, OTHERS, OTHERS) == ("W1_0",)
    reached.close()
    assert unreachable(own, OTHERS, OTHERS) == ("W0_1", "W1_0")


def test_who_connects_to_some_tries_all_others_only_if_one_of_them_is_out_of_reach():
    own, *stores = rendezvous_of(4)
    gone = [LinkCheck("127.0.0.1"), LinkCheck("127.0.0.1")]
    for store, other, check in zip(stores, OTHERS[1:], gone, strict=False):
        store.set(ready_key(other), check.address)
    gone[1].close()
    assert unreachable(own, OTHERS[:2], OTHERS) == ()
    gone[0].close()
    assert unreachable(own, OTHERS[:2], OTHERS) == ("W1_0", "W1_1")


def test_a_port_that_is_closed_leaves_no_thread():
    before = set(threading.enumerate())
    check = LinkCheck("127.0.0.1")
    (thread,) = set(threading.enumerate()) - before
    check.close()
    thread.join(10)
    assert not thread.is_alive()
