"""Every rule, kept and broken, on plans made by hand; test_rules_against_references.py adds random ones."""

from array import array
from dataclasses import replace

import pytest

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.op import Op
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import Violation, check, lag_us, makespan_us, needs, peak_in_flight, period_us, stage_windows
from recycle.core.problem import Memory, Problem, Techniques
from recycle.core.profile import Link, Profile, StageProfile
from tests.builders import (
    make_plan,
    make_problem,
    moved,
    one_f_one_b,
    plan_of,
    timed_of,
    with_memory,
    with_techniques,
    without,
)

COSTS = (10, 12, 8)


def split_plan() -> Plan:
    """One pipeline of two stages, two micro-batches, 3 µs between the stages."""
    return make_plan(
        make_problem(1, 2, 2, costs=COSTS, comm_us=3),
        {
            "W0_0": "0:0F0 10:0F1 38:0I0 50:0W0 60:0I1 72:0W1",
            "W0_1": "13:1F0 23:1I0 35:1F1 45:1I1 57:1W0 65:1W1",
        },
    )


def rerouted_plan() -> Plan:
    """W1_1 is dead, so W0_1 runs the micro-batch of pipeline 1 too."""
    return make_plan(
        make_problem(2, 2, 1, failed=["W1_1"], costs=COSTS, comm_us=3),
        {
            "W0_0": "0:0F0 48:0I0 60:0W0",
            "W0_1": "13:1F0 23:1F0@1 33:1I0 45:1I0@1 57:1W0 65:1W0@1",
            "W1_0": "0:0F0 60:0I0 72:0W0",
        },
    )


def only(plan: Plan) -> Violation:
    """The one violation of a plan that breaks one rule in one place."""
    found = check(plan)
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("plan", [split_plan(), rerouted_plan()])
def test_plans_made_by_hand_are_legal(plan):
    assert check(plan) == []
    assert plan.period_us == 80


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 2), (4, 6), (4, 8), (8, 16)])
@pytest.mark.parametrize("split", [False, True])
def test_1f1b_takes_three_slots_for_each_micro_batch_and_stage(stages, microbatches, split):
    problem = make_problem(3, stages, microbatches, techniques="decoupled" if split else "none")
    plan = one_f_one_b(problem, split=split)
    assert check(plan) == []
    if not split:
        assert period_us(plan) == makespan_us(plan) == 3 * (microbatches + stages - 1)
    assert peak_in_flight(plan) == [min(stages - stage, microbatches) for stage in range(stages)]


def texts(ops):
    return {str(op) for op in ops}


def test_ops_need_what_the_papers_say():
    assert texts(needs(Op.parse("0F3@1"), 4)) == set()
    assert texts(needs(Op.parse("2F3@1"), 4)) == {"1F3@1"}
    assert texts(needs(Op.parse("2I3@1"), 4)) == texts(needs(Op.parse("2B3@1"), 4)) == {"2F3@1", "3I3@1"}
    assert texts(needs(Op.parse("3I3@1"), 4)) == {"3F3@1"}
    assert texts(needs(Op.parse("2W3@1"), 4)) == {"2I3@1"}


def test_only_the_way_between_stages_takes_time():
    problem = split_plan().problem
    assert lag_us(Op.parse("0F0@0"), Op.parse("1F0@0"), problem) == 3
    assert lag_us(Op.parse("1I0@0"), Op.parse("0I0@0"), problem) == 3
    assert lag_us(Op.parse("1I0@0"), Op.parse("1W0@0"), problem) == 0


def test_a_gradient_goes_back_over_the_link_that_its_activation_came_by():
    stages = tuple(StageProfile(1, 1, 1, 2, output_bytes=size) for size in (5, 7, 100))
    problem = Problem(Cluster(Shape(1, 3, 1)), Profile(stages, stage_link=Link(1, 1.0)))
    assert lag_us(Op.parse("0F0@0"), Op.parse("1F0@0"), problem) == lag_us(Op.parse("1I0@0"), Op.parse("0I0@0"), problem) == 6
    assert lag_us(Op.parse("1F0@0"), Op.parse("2F0@0"), problem) == lag_us(Op.parse("2I0@0"), Op.parse("1I0@0"), problem) == 8


@pytest.mark.parametrize(
    ("op", "start_us", "message"),
    [
        ("1F1@0", 22, "1F1@0 starts at 22 µs, but the result of 0F1@0 is there at 23 µs: an op follows its forward"),
        ("0I1@0", 59, "0I1@0 starts at 59 µs, but the result of 1I1@0 is there at 60 µs: a gradient follows"),
        ("1I0@0", 22, "1I0@0 starts at 22 µs, but the result of 1F0@0 is there at 23 µs: an op follows its forward"),
        ("0W1@0", 71, "0W1@0 starts at 71 µs, but the result of 0I1@0 is there at 72 µs: a gradient follows"),
    ],
)
def test_no_op_starts_before_what_it_needs_has_arrived(op, start_us, message):
    late = [violation for violation in check(moved(split_plan(), op, start_us)) if violation.rule == "order"]
    assert len(late) == 1
    assert late[0].message.startswith(message)


def test_a_message_that_is_still_on_its_way_cannot_be_used():
    on_time, too_early = moved(split_plan(), "0I0@0", 38), moved(split_plan(), "0I0@0", 37)
    assert check(on_time) == []
    assert only(too_early).rule == "order"
    assert "0I0@0 starts at 37 µs, but the result of 1I0@0 is there at 38 µs" in only(too_early).message


def test_a_gradient_of_a_fused_backward_is_there_when_all_of_it_ended():
    problem = make_problem(1, 2, 1, costs=COSTS, comm_us=3)
    rows = {"W0_0": "0:0F0 46:0B0", "W0_1": "13:1F0 23:1B0"}
    assert check(make_plan(problem, rows)) == []
    early = make_plan(problem, {**rows, "W0_0": "0:0F0 45:0B0"})
    assert only(early).rule == "order"
    assert "0B0@0 starts at 45 µs, but the result of 1B0@0 is there at 46 µs" in only(early).message


def test_a_split_stage_may_follow_a_fused_one_and_the_other_way_round():
    problem = make_problem(1, 2, 1, costs=COSTS, comm_us=3)
    assert check(make_plan(problem, {"W0_0": "0:0F0 46:0I0 58:0W0", "W0_1": "13:1F0 23:1B0"})) == []
    assert check(make_plan(problem, {"W0_0": "0:0F0 38:0B0", "W0_1": "13:1F0 23:1I0 35:1W0"})) == []


def test_a_worker_does_one_op_at_a_time():
    found = only(moved(split_plan(), "0F1@0", 9))
    assert found.rule == "one op at a time"
    assert found.message == "W0_0 starts 0F1@0 at 9 µs, but 0F0@0 ends at 10 µs"


def test_a_row_is_in_order_of_time():
    plan = split_plan()
    timed = timed_of(plan)
    timed[Worker(0, 1)][4:] = reversed(timed[Worker(0, 1)][4:])
    found = only(plan_of(plan.problem, timed))
    assert found.rule == "one op at a time"
    assert found.message == "W0_1 starts 1W0@0 at 57 µs, but 1W1@0 ends at 73 µs"


def test_no_op_starts_before_time_zero():
    shifted = {worker: [(start - 1, op) for start, op in slots] for worker, slots in timed_of(split_plan()).items()}
    assert {violation.rule for violation in check(plan_of(split_plan().problem, shifted))} == {"time"}


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("0W1@0", "micro-batch 1@0 has 0F1@0 and 0I1@0 at stage 0, but needs an F and either a B or an I and a W"),
        ("1F0@0", "micro-batch 0@0 has 1I0@0 and 1W0@0 at stage 1"),
        ("1I1@0", "micro-batch 1@0 has 1F1@0 and 1W1@0 at stage 1"),
    ],
)
def test_a_missing_op_is_named_with_what_is_there(op, message):
    found = only(without(split_plan(), op))
    assert found.rule == "every op once"
    assert message in found.message


def test_a_micro_batch_that_a_stage_never_sees_is_named():
    plan = split_plan()
    for op in ("1F1@0", "1I1@0", "1W1@0"):
        plan = without(plan, op)
    assert "micro-batch 1@0 has nothing at stage 1" in only(plan).message


def test_a_backward_is_fused_or_split_but_not_both():
    plan = split_plan()
    timed = timed_of(plan)
    timed[Worker(0, 0)].append((80, Op.parse("0B1@0")))
    found = check(plan_of(plan.problem, timed))[0]
    assert found.rule == "every op once"
    assert "0F1@0 and 0B1@0 and 0I1@0 and 0W1@0" in found.message


@pytest.mark.parametrize("extra", ["0I1@0", "0W1@0"])
def test_a_fused_backward_takes_no_half_beside_it(extra):
    plan = one_f_one_b(make_problem(1, 1, 2))
    timed = timed_of(plan)
    timed[Worker(0, 0)].append((6, Op.parse(extra)))
    found = check(plan_of(plan.problem, timed))[0]
    assert found.rule == "every op once"
    assert f"micro-batch 1@0 has 0F1@0 and 0B1@0 and {extra} at stage 0" in found.message


def test_an_op_on_two_workers_is_named_with_both():
    plan = rerouted_plan()
    timed = timed_of(plan)
    timed[Worker(1, 0)].append((80, Op.parse("0W0@0")))
    found = check(plan_of(plan.problem, timed))[0]
    assert found.rule == "every op once"
    assert found.message == "0W0@0 is on W1_0 at 80 µs and on W0_0 too"


def test_an_op_twice_on_one_worker_is_named():
    plan = split_plan()
    timed = timed_of(plan)
    timed[Worker(0, 0)].append((80, Op.parse("0W1@0")))
    assert only(plan_of(plan.problem, timed)).message == "0W1@0 is on W0_0 at 80 µs and on W0_0 too"


def test_a_dead_worker_does_nothing():
    plan = rerouted_plan()
    timed = {**timed_of(plan), Worker(1, 1): []}
    assert only(plan_of(plan.problem, timed)) == Violation("workers", "W1_1 has a row, but it is dead")


@pytest.mark.parametrize("worker", [Worker(2, 0), Worker(0, 2)])
def test_a_worker_outside_the_cluster_has_no_row(worker):
    plan = rerouted_plan()
    found = only(plan_of(plan.problem, {**timed_of(plan), worker: []}, plan.period_us))
    assert found == Violation("workers", f"{worker} has a row, but the cluster has no such worker")


def test_a_live_worker_has_one_row():
    plan = rerouted_plan()
    twice = replace(
        plan,
        rows=(*plan.rows, replace(plan.rows[0], kinds="", chains=plan.rows[0].chains[:0], starts_us=plan.rows[0].starts_us[:0])),
    )
    assert only(twice) == Violation("workers", "W0_0 has 2 rows, but a worker has one")
    missing = [violation for violation in check(replace(plan, rows=plan.rows[:2])) if violation.rule == "workers"]
    assert missing == [Violation("workers", "W1_0 is alive, but it has no row")]


def test_two_rows_cannot_hide_that_a_worker_does_two_things_at_once():
    problem = make_problem(1, 1, 2)
    halves = [make_plan(problem, {"W0_0": f"0:0F{index} 1:0B{index}"}).rows[0] for index in (0, 1)]
    plan = replace(make_plan(problem, {"W0_0": "0:0F0 1:0B0"}), rows=tuple(halves))
    assert "workers" in {violation.rule for violation in check(plan)}


@pytest.mark.parametrize("op", ["0I0@0", "0W0@0"])
def test_a_backward_stays_with_the_worker_that_holds_the_activations(op):
    plan = rerouted_plan()
    timed = timed_of(plan)
    pair = next(pair for pair in timed[Worker(0, 0)] if str(pair[1]) == op)
    timed[Worker(0, 0)].remove(pair)
    timed[Worker(1, 0)] = sorted([*timed[Worker(1, 0)], pair], key=lambda pair: pair[0])
    found = [violation for violation in check(plan_of(plan.problem, timed)) if violation.rule == "one worker"]
    assert len(found) == 1
    assert f"{op} on W1_0" in found[0].message
    assert "0F0@0 on W0_0" in found[0].message


def test_memory_by_count_holds_a_micro_batch_from_forward_to_weight_gradient():
    plan = split_plan()
    assert peak_in_flight(plan) == [2, 2]
    assert check(with_memory(plan, Memory.microbatches([2, 2]))) == []
    found = only(with_memory(plan, Memory.microbatches([2, 1])))
    assert found.rule == "memory"
    assert found.message == "W0_1 holds 2 microbatches when 1F1@0 starts at 35 µs, but may hold 1"


def with_bytes(plan: Plan, limits: tuple[int, int]) -> Plan:
    stages = tuple(
        replace(stage, activation_bytes=100, weight_held_bytes=40, static_bytes=1000) for stage in plan.problem.profile.stages
    )
    profile = replace(plan.problem.profile, stages=stages)
    return replace(plan, problem=replace(plan.problem, profile=profile, memory=Memory.bytes(limits)))


def test_memory_by_bytes_is_released_in_part_when_the_input_gradient_ends():
    # Stage 1 runs F0 I0 F1: after I0 40 of 100 bytes remain, so F1 makes 140, not 200. Stage 0 runs F0 F1: 200.
    plan = split_plan()
    assert check(with_bytes(plan, (1200, 1140))) == []
    found = only(with_bytes(plan, (1200, 1139)))
    assert found.rule == "memory"
    assert found.message == "W0_1 holds 140 bytes when 1F1@0 starts at 35 µs, but may hold 139"
    assert only(with_bytes(plan, (1199, 1140))).message.startswith("W0_0 holds 200 bytes when 0F1@0 starts at 10 µs")


def test_a_fused_backward_releases_everything_at_once():
    plan = one_f_one_b(make_problem(1, 1, 3))
    assert check(with_memory(plan, Memory.microbatches([1]))) == []


def test_a_wrong_period_is_corrected():
    found = only(replace(split_plan(), period_us=79))
    assert found == Violation("period", "the plan claims a period of 79 µs, but its slots take 80 µs")
    assert only(replace(split_plan(), period_us=81)).rule == "period"


def test_a_bound_above_the_period_proves_nothing():
    plan = split_plan()
    assert check(replace(plan, quality=replace(plan.quality, bound_us=80))) == []
    found = only(replace(plan, quality=replace(plan.quality, bound_us=81)))
    assert found == Violation("bound", "the bound 81 µs lies above the period 80 µs")


def test_a_backward_is_split_only_by_decoupled_backprop():
    found = check(with_techniques(split_plan(), "adaptive,staggered"))
    assert found == [
        Violation("techniques", f"{worker} splits a backward pass, but 'decoupled' is off") for worker in ("W0_0", "W0_1")
    ]


def test_a_micro_batch_is_rerouted_only_by_adaptive_pipelining():
    problem = make_problem(2, 1, 1, costs=COSTS)
    plan = make_plan(problem, {"W0_0": "0:0F0 10:0B0 30:0F0@1 40:0B0@1", "W1_0": ""})
    assert check(plan) == []
    found = check(with_techniques(plan, "decoupled,staggered"))
    assert {violation.rule for violation in found} == {"techniques"}
    assert "W0_0 runs 0F0@1 of another pipeline, but 'adaptive' is off" in found[0].message


def stepping_problem(techniques: str) -> Problem:
    """Two peers, gradients that take 6 µs to reduce at stage 0 and 2 at stage 1, steps of 5 and 9 µs."""
    stages = (
        StageProfile(*COSTS, fused_us=20, optimizer_us=5, gradient_bytes=6),
        StageProfile(*COSTS, fused_us=20, optimizer_us=9, gradient_bytes=2),
    )
    return Problem(Cluster(Shape(2, 2, 1)), Profile(stages, peer_link=Link(0, 1.0)), techniques=Techniques.parse(techniques))


def test_a_staggered_period_is_the_longest_stage_and_a_synchronous_one_waits_for_all():
    rows = {"W0_0": "0:0F0 40:0B0", "W0_1": "10:1F0 20:1B0", "W1_0": "0:0F0 40:0B0", "W1_1": "10:1F0 20:1B0"}
    staggered = make_plan(stepping_problem("adaptive,staggered"), rows)
    assert stage_windows(staggered) == [(0, 60), (10, 40)]
    # Stage 0: 60 + 6 + 5 - 0 = 71; stage 1: 40 + 2 + 9 - 10 = 41.
    assert (period_us(staggered), makespan_us(staggered)) == (71, 71)
    # Everybody has reduced at 66, and the slowest step takes 9.
    synchronous = make_plan(stepping_problem("adaptive"), rows)
    assert (period_us(synchronous), makespan_us(synchronous)) == (75, 75)
    assert check(staggered) == check(synchronous) == []


def test_a_staggered_period_may_be_shorter_than_the_makespan():
    # Stage 0 works from 0 to 34 µs, stage 1 from 1 to 40: it starts its next iteration 39 µs after this one.
    plan = make_plan(make_problem(1, 2, 1, costs=(1, 1, 30)), {"W0_0": "0:0F0 3:0I0 4:0W0", "W0_1": "1:1F0 2:1I0 10:1W0"})
    assert check(plan) == []
    assert (period_us(plan), makespan_us(plan)) == (39, 40)


def test_rows_of_no_worker_of_the_cluster_are_refused():
    plan = split_plan()
    ghost = replace(plan.rows[0], worker=Worker(-2, 0))
    assert [v.rule for v in check(replace(plan, rows=(*plan.rows, ghost)))] == ["workers"]


def test_ops_of_no_micro_batch_of_the_cluster_are_refused():
    plan = split_plan()
    row = plan.rows[0]
    stray = replace(row, chains=array("q", [-1, *row.chains[1:]]))
    assert [v.rule for v in check(replace(plan, rows=(stray, *plan.rows[1:])))] == ["every op once"]


def test_a_plan_is_not_optimal_above_its_bound():
    plan = split_plan()
    claim = replace(plan.quality, status="optimal", bound_us=plan.period_us - 1)
    assert [v.rule for v in check(replace(plan, quality=claim))] == ["bound"]
