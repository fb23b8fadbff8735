"""Peers that hold different weights: who is the odd one, and when nobody can tell."""

from recycle.core.cluster import Worker
from recycle.runtime.coordinator.ledger.peer_comparison import compare_peers


def compared(**checksums: str):
    return compare_peers(8, 5, {Worker.parse(name): checksum for name, checksum in checksums.items()})


def test_peers_of_different_stages_may_differ():
    assert compared(W0_0="a", W1_0="a", W0_1="b", W1_1="b") is None


def test_three_peers_outvote_the_odd_one():
    found = compared(W0_0="a", W1_0="a", W2_0="a", W0_1="b", W1_1="c", W2_1="b")
    assert found is not None
    assert found.odd == [Worker(1, 1)]
    assert str(found) == "W0_1, W1_1, W2_1 hold different weights after step 8; all peers agreed after step 5"


def test_two_peers_or_two_against_two_cannot_tell_who_is_right():
    assert compared(W0_0="a", W1_0="b").odd == []
    assert compared(W0_0="a", W1_0="a", W2_0="b", W3_0="b").odd == []
    assert compared(W0_0="a", W1_0="b", W2_0="c").odd == []


def test_a_worker_that_did_not_compare_has_no_vote():
    assert compared(W0_0="a", W1_0="", W2_0="a") is None
