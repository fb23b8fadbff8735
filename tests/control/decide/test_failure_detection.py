"""Failure detection: which facts make a member suspected, with the test's own clock."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.control.decide.failure_detection import (
    PATIENCE,
    SLOW_S,
    STARVED_LEASES,
    STEP_LEASES,
    MemberFacts,
    Wait,
    cut_off_members,
    stuck_member,
    suspicion,
)

LEASE_S = 2.0
times = st.floats(0, 1e6)


def suspected(
    now_s: float = 100.0, busy_s: float = 0.0, longest_op_s: float = 0.01, is_running: bool = False, doing: str = ""
) -> str | None:
    """The suspicion of a member that was last seen at 100 s."""
    return suspicion(now_s, MemberFacts(100.0, busy_s, is_running, doing), LEASE_S, longest_op_s)


def test_a_member_that_renews_its_lease_is_alive() -> None:
    assert suspected(100.0 + LEASE_S / 2) is None


def test_a_silent_member_is_suspected_before_its_lease_ends_to_be_fenced_by_then() -> None:
    assert suspected(100.0 + 0.89 * LEASE_S) is None
    assert suspected(100.0 + 0.91 * LEASE_S) == "silent for 1.8 s, with a lease of 2 s"


def test_a_suspicion_says_how_long_the_member_was_silent() -> None:
    assert suspected(102.5) == "silent for 2.5 s, with a lease of 2 s"


def test_an_op_may_take_the_lease_however_short_others_were() -> None:
    assert suspected(busy_s=LEASE_S, longest_op_s=1e-6) is None
    assert suspected(busy_s=LEASE_S + 0.1, longest_op_s=1e-6) is not None


def test_an_op_may_take_many_times_as_long_as_the_longest_one() -> None:
    assert suspected(busy_s=PATIENCE * 3.0, longest_op_s=3.0) is None
    reason = suspected(busy_s=PATIENCE * 3.0 + 1, longest_op_s=3.0)
    assert reason == "far behind its plan: it has been busy for 31.0 s with an op, where no op took over 3 s"


def test_reducing_and_stepping_have_a_limit_like_ops_but_of_some_leases() -> None:
    for doing in ("reduce", "optimizer"):
        assert suspected(busy_s=STEP_LEASES * LEASE_S - 0.1, doing=doing) is None
        reason = suspected(busy_s=STEP_LEASES * LEASE_S + 0.1, doing=doing)
        assert reason == f"far behind its plan: it has been busy for 10.1 s with {doing}, where no op took over 0.01 s"


def test_setting_up_saving_and_finishing_have_a_limit_of_minutes() -> None:
    for doing in ("set up", "save", "finish"):
        assert suspected(busy_s=SLOW_S - 1, doing=doing) is None
        assert suspected(busy_s=SLOW_S + 1, doing=doing) == f"far behind its plan: it has been busy for 601.0 s with {doing}"


# Members that wait for each other.


def waits(*seconds: float, is_connecting: bool = False) -> list[Wait]:
    """W0_1 waits for W1_0, W1_0 for W0_0, W0_0 for W0_1, for so long each."""
    pairs = [("W0_1", "W1_0"), ("W1_0", "W0_0"), ("W0_0", "W0_1")]
    return [Wait(place, (other,), waited_s, is_connecting) for (place, other), waited_s in zip(pairs, seconds, strict=True)]


def test_the_other_end_of_the_longest_wait_is_given_up_when_all_wait_for_long() -> None:
    assert stuck_member(waits(7.0, 6.5, 6.1), LEASE_S, 0.01) == (
        "W1_0",
        "W0_1 has waited 7.0 s for W1_0, and nobody computes: their link seems to be cut",
    )


@pytest.mark.parametrize("shortest_s", [0.0, 5.9])
def test_nobody_is_given_up_while_one_computes_or_has_just_begun_to_wait(shortest_s: float) -> None:
    assert stuck_member(waits(700.0, shortest_s, 700.0), LEASE_S, 0.01) is None


def test_long_ops_and_connecting_give_more_time() -> None:
    assert stuck_member(waits(29.0, 29.0, 29.0), LEASE_S, 3.0) is None
    assert stuck_member(waits(29.0, 29.0, 29.0, is_connecting=True), LEASE_S, 0.01) is None
    assert stuck_member(waits(31.0, 31.0, 31.0, is_connecting=True), LEASE_S, 0.01) is not None


def test_of_a_group_that_one_waits_for_the_member_that_most_wait_for_is_given_up() -> None:
    group = [Wait("W0_0", ("W1_0", "W2_0"), 9.0), Wait("W1_0", ("W2_0",), 8.0), Wait("W2_0", ("W0_0",), 7.0)]
    found = stuck_member(group, LEASE_S, 0.01)
    assert found is not None
    assert found[0] == "W2_0"


@pytest.mark.parametrize(
    ("unreachable", "num_members", "lost"),
    [
        (["W0_1"], 2, ["W0_1"]),
        (["W0_1"], 4, ["W0_1"]),
        (["W0_1"], 3, ["W0_1"]),
        (["W0_1", "W1_1"], 4, ["W0_0"]),
        (["W0_1", "W1_1"], 6, ["W0_1", "W1_1"]),
        (["W0_1", "W1_0", "W1_1"], 4, ["W0_0"]),
    ],
)
def test_who_cannot_connect_to_most_others_is_cut_off_itself(unreachable: list[str], num_members: int, lost: list[str]) -> None:
    given_up, reason = cut_off_members("W0_0", unreachable, num_members)
    assert given_up == lost
    assert reason == f"W0_0 cannot connect to {', '.join(unreachable)}: their link seems to be cut"


def test_without_members_nobody_is_stuck() -> None:
    assert stuck_member([], LEASE_S, 0.01) is None


def test_no_member_is_behind_its_plan_before_the_time_of_an_op_is_known() -> None:
    """The first ops of a job, or the first that a new coordinator hears of, may each take longer than a lease."""
    assert suspected(busy_s=100 * LEASE_S, longest_op_s=0.0) is None
    assert suspected(103.0, busy_s=100 * LEASE_S, longest_op_s=0.0) is not None


@settings(deadline=None)
@given(times, times, times, st.floats(0.01, 100), times, st.booleans())
def test_a_member_is_alive_or_suspected_with_a_reason(
    now_s: float, last_seen_s: float, busy_s: float, lease_s: float, longest_op_s: float, is_running: bool
) -> None:
    reason = suspicion(now_s, MemberFacts(last_seen_s, busy_s, is_running), lease_s, longest_op_s)
    is_silent = now_s - last_seen_s > lease_s * (STARVED_LEASES if is_running else 0.9)
    limit_s = max(lease_s, PATIENCE * longest_op_s) if longest_op_s else max(SLOW_S, STEP_LEASES * lease_s)
    is_behind = busy_s > limit_s
    assert (reason is not None) == (is_silent or is_behind)
    assert reason != ""


@pytest.mark.parametrize("busy_s", [0.0, 1e9])
def test_silence_counts_for_more_than_a_long_op(busy_s: float) -> None:
    assert str(suspected(103.0, busy_s=busy_s)).startswith("silent")


@pytest.mark.parametrize(("num_leases", "is_alive"), [(1.5, True), (4.9, True), (5.1, False)])
def test_a_silent_member_whose_process_is_seen_running_gets_five_leases(num_leases: float, is_alive: bool) -> None:
    assert (suspected(100.0 + num_leases * LEASE_S, is_running=True) is None) == is_alive
