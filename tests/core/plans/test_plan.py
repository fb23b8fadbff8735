"""Plans as data: columns, slots, and the file."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings

from recycle.core.cluster import Shape, Worker
from recycle.core.errors import FileProblem, UserError
from recycle.core.op import MicroBatch, Op
from recycle.core.plans.plan import Plan, chain_of, make_row, microbatch_of
from recycle.core.plans.rules import check
from tests.builders import make_plan, make_problem, one_f_one_b
from tests.random_plans import legal_plans


def rerouted_plan():
    """W1_1 is dead, so W0_1 runs the micro-batch of pipeline 1 too."""
    problem = make_problem(2, 2, 1, failed=["W1_1"], costs=(10, 12, 8), comm_us=3)
    return make_plan(
        problem,
        {
            "W0_0": "0:0F0 48:0I0 60:0W0",
            "W0_1": "13:1F0 23:1F0@1 33:1I0 45:1I0@1 57:1W0 65:1W0@1",
            "W1_0": "0:0F0 60:0I0 72:0W0",
        },
    )


@settings(max_examples=60, deadline=None)
@given(legal_plans())
def test_a_plan_survives_its_file(tmp_path_factory, plan):
    path = tmp_path_factory.getbasetemp() / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan


def test_a_plan_on_disk_reads_like_a_plan(tmp_path):
    rerouted_plan().save(tmp_path / "plan.json")
    lines = (tmp_path / "plan.json").read_text().splitlines()
    assert '  "W0_1": "13:1F0 23:1F0@1 33:1I0 45:1I0@1 57:1W0 65:1W0@1",' in lines
    assert json.loads("\n".join(lines))["problem"]["failed"] == ["W1_1"]


def test_slots_carry_worker_op_and_both_times():
    plan = rerouted_plan()
    slots = list(plan.slots(plan.rows[1]))
    assert [str(slot) for slot in slots[:2]] == ["1F0@0 on W0_1 from 13 to 23 µs", "1F0@1 on W0_1 from 23 to 33 µs"]
    assert [slot.is_rerouted for slot in slots] == [False, True] * 3
    assert len(list(plan.all_slots())) == plan.num_ops == 12


def test_a_chain_is_a_micro_batch_by_number():
    shape = Shape(3, 4, 6)
    assert chain_of(shape, MicroBatch(pipeline=2, index=5)) == 17
    assert [microbatch_of(shape, chain) for chain in (0, 6, 17)] == [MicroBatch(0, 0), MicroBatch(1, 0), MicroBatch(2, 5)]


def test_the_gap_is_the_period_over_the_bound():
    plan = rerouted_plan()
    assert replace(plan, quality=replace(plan.quality, bound_us=40)).gap == 2.0
    assert replace(plan, quality=replace(plan.quality, bound_us=0)).gap == math.inf


def test_a_row_refuses_ops_of_another_stage():
    with pytest.raises(UserError, match=r"the row of W0_1 holds 0F0@0, but that worker holds stage 1 only"):
        make_row(Shape(2, 2, 1), Worker(0, 1), [(0, Op.parse("0F0@0"))])


@pytest.mark.parametrize("op", ["1F1@0", "1F0@2"])
def test_a_row_refuses_micro_batches_that_do_not_exist(op):
    with pytest.raises(UserError, match=rf"the row of W0_1 holds {op}, but there are only 2 pipelines of 1 micro-batches"):
        make_row(Shape(2, 2, 1), Worker(0, 1), [(0, Op.parse(op))])


def test_a_plan_of_the_worked_example_stays_legal_on_disk(tmp_path):
    plan = one_f_one_b(make_problem(3, 4, 6, techniques="none"))
    plan.save(tmp_path / "plan.json")
    assert check(Plan.load(tmp_path / "plan.json")) == []


def save_changed(path, change):
    data = json.loads(rerouted_plan().dumps())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("rows"), "not a whole plan: KeyError 'rows'; plan again"),
        (lambda data: data.update(rows=[]), "not a whole plan"),
        (lambda data: data.update(rows=None), "not a whole plan"),
        (lambda data: data["rows"].update(W0_0=7), "not a whole plan"),
        (lambda data: data.pop("problem"), "not a whole plan: KeyError 'problem'"),
        (lambda data: data.update(problem=[]), "not a whole plan"),
        (lambda data: data["problem"].pop("shape"), "not a whole plan: KeyError 'shape'"),
        (lambda data: data["problem"].update(failed=[3]), "not a whole plan"),
        (lambda data: data.pop("period_us"), "not a whole plan: KeyError 'period_us'"),
        (lambda data: data.update(period_us="long"), "not a whole plan: ValueError"),
        (lambda data: data.update(bound_us=float("inf")), "not a whole plan: OverflowError"),
        (lambda data: data.update(seconds=None), "not a whole plan"),
        (lambda data: data["rows"].update(W0_0="9" * 30 + ":0F0"), "not a whole plan: OverflowError"),
        (lambda data: data["rows"].update(X0_0=""), "not a usable plan: 'X0_0' is not a worker"),
        (lambda data: data["rows"].update(W0_0="0F0"), "not a usable plan: the row of W0_0 holds '0F0'"),
        (lambda data: data["rows"].update(W0_0="-3:0F0"), "not a usable plan: the row of W0_0 holds '-3:0F0'"),
        (lambda data: data["rows"].update(W0_0="3:0X0"), "not a usable plan: '0X0' is not an op"),
        (lambda data: data["rows"].update(W0_0="3:1F0"), "not a usable plan: the row of W0_0 holds 1F0@0"),
        (lambda data: data["problem"]["shape"].update(stages=0), "not a usable plan: the number of stages is 0"),
        (lambda data: data["problem"].update(techniques=["magic"]), "not a usable plan: 'magic' is not a technique"),
        (lambda data: data["problem"].update(techniques=[]), "not a usable plan: W1_1 failed"),
        (lambda data: data["problem"]["profile"].update(stages=[]), "not a usable plan: the profile has no stage"),
    ],
)
def test_a_broken_plan_file_gets_one_sentence(tmp_path, change, message):
    path = tmp_path / "plan.json"
    save_changed(path, change)
    with pytest.raises(FileProblem, match=message) as caught:
        Plan.load(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_worker_written_twice_in_a_file_does_not_pass_the_check(tmp_path):
    # Two spellings of one worker are two keys to JSON.
    save_changed(tmp_path / "plan.json", lambda data: data["rows"].update(W00_0=data["rows"]["W0_0"]))
    rules = {violation.rule for violation in check(Plan.load(tmp_path / "plan.json"))}
    assert rules == {"workers", "every op once"}
