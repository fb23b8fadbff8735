"""The paper's worked example: D=3, S=4, M=6, every op one slot, W1_2 dead. Every number is a proven optimum."""

import pytest

import recycle
from recycle import Plan
from recycle.core.plans.rules import check
from recycle.planner.exact import cpsat
from recycle.planner.exact.exact_model import ExactLimit
from tests.planner.exact.serial import serial

TIGHT = "4,3,2,1"  # what 1F1B keeps in flight
SYNCHRONOUS, ALL = "adaptive,decoupled", "adaptive,decoupled,staggered"
IN_EVERY_STAGE = ["W0_0,W1_1,W2_2,W0_3", "W1_0,W1_1,W1_2,W1_3", "W2_0,W0_1,W1_2,W1_3"]


def example(fail: str, techniques: str, memory: str | int) -> recycle.Problem:
    return recycle.problem(3, 4, 6, fail=fail, costs=(1, 1, 1), memory=memory, techniques=techniques)


def solved(fail: str, techniques: str, memory: str | int) -> Plan:
    plan = recycle.solve(example(fail, techniques, memory), time_limit_s=30)
    assert check(plan) == []
    return plan


def assert_proven(plan: Plan, period_us: int) -> None:
    assert (plan.period_us, plan.quality.status) == (period_us, "optimal")


@pytest.mark.parametrize(
    ("fail", "techniques", "memory", "slots"),
    [
        pytest.param("", "none", TIGHT, 27, id="fault-free 1F1B"),
        pytest.param("W1_2", "adaptive", TIGHT, 36, id="adaptive, memory of 1F1B"),
        pytest.param("W1_2", "adaptive", 6, 33, id="adaptive, spare memory"),
        pytest.param("W1_2", SYNCHRONOUS, 6, 29, id="and decoupled"),
        pytest.param("W1_2", ALL, 6, 27, id="and staggered"),
    ],
)
def test_each_technique_brings_the_failure_nearer_to_costing_nothing(
    fail: str, techniques: str, memory: str | int, slots: int
) -> None:
    assert_proven(solved(fail, techniques, memory), slots)


def test_without_a_failure_one_idle_slot_remains() -> None:
    """The first gradient is back at stage 0 after seven slots, and there are only six forwards to fill them: 6 * 3 + 1."""
    assert_proven(solved("", ALL, "unlimited"), 19)


# Seven micro-batches are what the peers of a dead first or last stage need to lose nothing; with six they lose one slot.
@pytest.mark.parametrize("stage", range(4))
def test_the_staggered_optimizer_hides_a_failure_at_any_stage(stage: int) -> None:
    assert_proven(solved(f"W1_{stage}", ALL, 7), 27)


@pytest.mark.parametrize("stage", range(4))
def test_a_synchronous_optimizer_pays_one_slot_for_each_stage_before_the_failure(stage: int) -> None:
    assert_proven(solved(f"W1_{stage}", SYNCHRONOUS, 7), 27 + stage)


# Golden: CP-SAT proves these from nothing (no hint, no bound) in 0.2 to 35 s.
@pytest.mark.parametrize(("stage", "adaptive", "decoupled", "staggered"), [(0, 31, 28, 28), (1, 31, 28, 27), (3, 36, 30, 28)])
def test_six_micro_batches_in_flight_have_a_proven_price_at_every_stage(
    stage: int, adaptive: int, decoupled: int, staggered: int
) -> None:
    for techniques, slots in (("adaptive", adaptive), (SYNCHRONOUS, decoupled), (ALL, staggered)):
        assert_proven(solved(f"W1_{stage}", techniques, 6), slots)


@pytest.mark.parametrize(("stage", "slots"), [(0, 31), (1, 31), (2, 33), (3, 36)])
def test_cpsat_proves_the_price_of_adaptive_pipelining_without_being_told_a_bound(stage: int, slots: int) -> None:
    problem = example(f"W1_{stage}", "adaptive", 6)
    exact = cpsat.solve_cpsat(problem, ExactLimit.seconds(60.0), serial(problem), 0)
    assert exact.bound_us == slots
    assert exact.schedule is not None
    assert exact.schedule.period_us(problem) == slots


@pytest.mark.parametrize("fail", IN_EVERY_STAGE)
def test_one_failure_in_every_stage_is_hidden_too(fail: str) -> None:
    assert_proven(solved(fail, ALL, "unlimited"), 27)


@pytest.mark.parametrize("fail", IN_EVERY_STAGE)
def test_one_failure_in_every_stage_costs_a_synchronous_optimizer_no_more_than_one_in_the_last(fail: str) -> None:
    assert_proven(solved(fail, SYNCHRONOUS, 9), 30)


def test_only_the_peers_of_the_dead_worker_need_memory_for_six() -> None:
    assert_proven(solved("W1_2", ALL, "4,3,6,2"), 27)


@pytest.mark.parametrize(("shape", "slots"), [((4, 4, 8), 42), ((4, 8, 16), 87)])
def test_adaptive_alone_in_the_memory_of_1f1b_is_planned_as_well_in_larger_shapes(
    shape: tuple[int, int, int], slots: int
) -> None:
    tight = ",".join(str(shape[1] - stage) for stage in range(shape[1]))
    problem = recycle.problem(*shape, fail="W1_2", costs=(1, 1, 1), memory=tight, techniques="adaptive")
    assert_proven(recycle.solve(problem), slots)
