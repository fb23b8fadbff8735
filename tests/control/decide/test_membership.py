"""Who is alive: told by facts and a clock that the test holds in its hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.control.decide.membership import PATIENCE, Liveness, LivenessVerdict, MemberFacts, judge_liveness

LEASE_S = 2.0
times = st.floats(0, 1e6)


def judged(
    now_s: float = 100.0, heard_s: float = 100.0, busy_s: float = 0.0, longest_op_s: float = 0.01, **facts: bool
) -> LivenessVerdict:
    connected = facts.get("is_connected", True)
    return judge_liveness(now_s, MemberFacts(heard_s, connected, busy_s), LEASE_S, longest_op_s, facts.get("is_away", False))


def test_whoever_speaks_as_often_as_it_is_to_is_alive() -> None:
    assert judged(100.0 + LEASE_S / 2) == LivenessVerdict(Liveness.ALIVE)


def test_whoever_does_not_is_suspected_before_its_lease_is_over_to_be_fenced_by_then() -> None:
    assert judged(100.0 + 0.89 * LEASE_S) == LivenessVerdict(Liveness.ALIVE)
    assert judged(100.0 + 0.91 * LEASE_S) == LivenessVerdict(Liveness.SUSPECT, "silent for 1.8 s, with a lease of 2 s")


def test_whoever_is_silent_for_longer_is_suspected_with_the_time() -> None:
    assert judged(102.5) == LivenessVerdict(Liveness.SUSPECT, "silent for 2.5 s, with a lease of 2 s")


def test_a_closed_connection_is_a_death_at_once() -> None:
    assert judged(is_connected=False) == LivenessVerdict(Liveness.DEAD, "its connection closed")


def test_a_closed_connection_means_nothing_to_a_coordinator_that_was_away() -> None:
    assert judged(is_connected=False, is_away=True).state is Liveness.ALIVE
    assert judged(102.5, is_connected=False, is_away=True).state is Liveness.SUSPECT


def test_an_op_may_take_the_lease_however_short_others_were() -> None:
    assert judged(busy_s=LEASE_S, longest_op_s=1e-6).state is Liveness.ALIVE
    assert judged(busy_s=LEASE_S + 0.1, longest_op_s=1e-6).state is Liveness.SUSPECT


def test_an_op_may_take_many_times_what_the_longest_took() -> None:
    assert judged(busy_s=PATIENCE * 3.0, longest_op_s=3.0).state is Liveness.ALIVE
    verdict = judged(busy_s=PATIENCE * 3.0 + 1, longest_op_s=3.0)
    assert verdict.state is Liveness.SUSPECT
    assert verdict.reason == "far behind its plan: an op has been computing for 31.0 s, where none took over 3 s"


def test_nobody_is_behind_while_it_is_not_known_how_long_ops_take() -> None:
    """The first ops of a job, or the first that a new coordinator hears of, may each take longer than a lease."""
    assert judged(busy_s=100 * LEASE_S, longest_op_s=0.0).state is Liveness.ALIVE
    assert judged(103.0, busy_s=100 * LEASE_S, longest_op_s=0.0).state is Liveness.SUSPECT


@settings(deadline=None)
@given(times, times, st.booleans(), times, st.floats(0.01, 100), times, st.booleans())
def test_whoever_is_not_alive_has_a_reason(
    now_s: float, heard_s: float, is_connected: bool, busy_s: float, lease_s: float, longest_op_s: float, is_away: bool
) -> None:
    verdict = judge_liveness(now_s, MemberFacts(heard_s, is_connected, busy_s), lease_s, longest_op_s, is_away)
    assert bool(verdict.reason) == (verdict.state is not Liveness.ALIVE)


@pytest.mark.parametrize("busy_s", [0.0, 1e9])
def test_silence_counts_for_more_than_work(busy_s: float) -> None:
    assert judged(103.0, busy_s=busy_s).reason.startswith("silent")


def test_who_is_silent_but_seen_running_waits_for_a_processor_and_gets_five_leases():
    for silence_s, state in ((1.5 * LEASE_S, Liveness.ALIVE), (4.9 * LEASE_S, Liveness.ALIVE), (5.1 * LEASE_S, Liveness.SUSPECT)):
        assert judge_liveness(100.0 + silence_s, MemberFacts(100.0, True, is_running=True), LEASE_S, 0.1).state is state
