"""The warm-up of every row, and the messages of its instructions: for any legal plan."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import recycle
from recycle.core.op import Kind
from recycle.core.plans.plan import chain_of
from recycle.core.plans.row_programs import RowProgram, row_programs, warm_ups
from recycle.core.plans.rules import check, needs
from recycle.runtime.execute.row_program import compile_row
from tests.builders import make_plan, make_problem, one_f_one_b
from tests.random_plans import legal_plans

pytestmark = pytest.mark.timeout(120)
TECHNIQUES = ["none", "adaptive", "adaptive,decoupled", "adaptive,staggered", "adaptive,decoupled,staggered"]


@st.composite
def solved_plans(draw):
    """Plans as the planner makes them: any shape, dead workers, techniques, costs, memory."""
    num_pipelines, num_stages, num_microbatches = (draw(st.integers(1, most)) for most in (3, 4, 5))
    techniques = draw(st.sampled_from(TECHNIQUES))
    mortal = [f"W{p}_{s}" for p in range(1, num_pipelines) for s in range(num_stages)] if techniques != "none" else []
    dead = draw(st.sets(st.sampled_from(mortal), max_size=3)) if mortal else set()
    wanted = recycle.problem(
        num_pipelines,
        num_stages,
        num_microbatches,
        fail=",".join(sorted(dead)),
        costs=tuple(draw(st.integers(1, 9)) for _ in range(3)),
        comm=draw(st.integers(0, 3)),
        memory=draw(st.sampled_from([None, None, "2", "4"])),
        techniques=techniques,
    )
    return recycle.solve(wanted, "greedy")


plans = st.one_of(legal_plans(), solved_plans())
often = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def rows_of(plan):
    """The ops of every worker in order."""
    return {row.worker: [slot.op for slot in plan.slots(row)] for row in plan.rows}


def instructions_of(plan):
    """The instructions of every worker, from its row program as it travels."""
    programs = {worker: RowProgram.parse(program.dumps()) for worker, program in row_programs(plan).items()}
    return {worker: compile_row(program, plan.problem.shape) for worker, program in programs.items()}


# Warm-ups.


@often
@given(plans)
def test_a_warm_up_is_forward_passes_needs_nothing_else_and_could_not_be_longer(plan):
    lengths, rows = warm_ups(plan), rows_of(plan)
    assert set(lengths) == set(rows)
    warm = {op for worker, ops in rows.items() for op in ops[: lengths[worker]]}
    for worker, ops in rows.items():
        assert 0 <= lengths[worker] <= len(ops)
        assert all(op.kind is Kind.F for op in ops[: lengths[worker]])
        for op in ops[: lengths[worker]]:
            assert warm.issuperset(needs(op, plan.problem.shape.num_stages)), op
        for following in ops[lengths[worker] : lengths[worker] + 1]:
            is_held_up = not warm.issuperset(needs(following, plan.problem.shape.num_stages))
            assert following.kind is not Kind.F or is_held_up, following


def lengths_of(plan):
    assert not check(plan)
    return {str(worker): length for worker, length in warm_ups(plan).items()}


def test_the_warm_up_of_1f1b_is_what_runs_ahead_and_one_more_where_a_pipeline_begins():
    plan = one_f_one_b(make_problem(1, 3, 4, techniques="none"))
    # After its two passes ahead W0_0 runs a third before its first backward pass, and so on.
    assert lengths_of(plan) == {"W0_0": 3, "W0_1": 2, "W0_2": 1}


def test_who_waits_for_a_pass_behind_a_backward_one_has_no_warm_up_nor_has_who_waits_for_that_one():
    made = make_plan(
        make_problem(2, 3, 1, failed=["W1_0"]),
        {
            "W0_0": "0:0F0 5:0I0 6:0F0@1 11:0I0@1 12:0W0 13:0W0@1",  # the other pipeline's pass comes after a backward one
            "W0_1": "1:1F0 4:1I0 5:1W0",
            "W1_1": "7:1F0 10:1I0 11:1W0",
            "W0_2": "2:2F0 3:2I0 4:2W0",
            "W1_2": "8:2F0 9:2I0 10:2W0",
        },
    )
    assert lengths_of(made) == {"W0_0": 1, "W0_1": 1, "W1_1": 0, "W0_2": 1, "W1_2": 0}


# Instructions.


@often
@given(plans)
def test_instructions_are_the_rows_op_by_op(plan):
    instructions = instructions_of(plan)
    for worker, ops in rows_of(plan).items():
        assert [each.label for each in instructions[worker]] == [str(op) for op in ops]
        assert [(each.kind, each.microbatch) for each in instructions[worker]] == [(op.kind, op.microbatch) for op in ops]
        assert [each.chain for each in instructions[worker]] == [chain_of(plan.problem.shape, op.microbatch) for op in ops]
    assert set(instructions) == set(rows_of(plan))


@often
@given(plans)
def test_every_message_is_sent_once_and_received_once_at_the_indices_that_it_says(plan):
    lengths, rows = warm_ups(plan), rows_of(plan)
    instructions = instructions_of(plan)
    sent_at = [
        (each.sends, (worker, index)) for worker in instructions for index, each in enumerate(instructions[worker]) if each.sends
    ]
    received_at = [
        (each.receives, (worker, index))
        for worker in instructions
        for index, each in enumerate(instructions[worker])
        if each.receives
    ]
    assert Counter(message for message, _ in sent_at) == Counter(message for message, _ in received_at)
    assert len(dict(sent_at)) == len(sent_at) == len(received_at)
    for message, where in sent_at:
        assert where == (message.sender, message.made_at)
        assert message.is_of_warm_up == (message.made_at < lengths[message.sender])
    for message, where in received_at:
        assert where == (message.receiver, message.taken_at)
    # One forwards and one backwards for every micro-batch and every border between two stages, and what they carry is right.
    shape = plan.problem.shape
    assert len(sent_at) == 2 * (shape.num_stages - 1) * shape.num_chains
    for message, _ in sent_at:
        made, used = rows[message.sender][message.made_at], rows[message.receiver][message.taken_at]
        assert made.microbatch == used.microbatch
        assert chain_of(shape, made.microbatch) == message.chain
        assert used.stage == message.stage
        if message.kind is Kind.F:
            assert (made.kind, used.kind, made.stage) == (Kind.F, Kind.F, used.stage - 1)
        else:
            assert message.kind is Kind.I
            assert {made.kind, used.kind} <= {Kind.I, Kind.B}
            assert made.stage == used.stage + 1


def test_a_gradient_goes_back_to_whoever_ran_the_forward_pass():
    plan = recycle.solve(recycle.problem(2, 2, 2, fail="W1_1", costs=(1, 1, 1)), "greedy")
    instructions = instructions_of(plan)
    (worker,) = [row.worker for row in plan.rows if row.worker.stage == 1]
    receivers = {each.microbatch.pipeline: each.sends.receiver for each in instructions[worker] if each.sends}
    assert {home: str(receiver) for home, receiver in receivers.items()} == {0: "W0_0", 1: "W1_0"}
    assert {each.receives.sender for each in instructions[worker] if each.receives} == set(receivers.values())
