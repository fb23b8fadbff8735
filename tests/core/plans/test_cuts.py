"""Plans that cut micro-batches: their file, the layers and lengths of their ops, the rules, and the window of a shared layer."""

from array import array
from dataclasses import replace

import pytest

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import FileProblem, UserError
from recycle.core.op import Kind
from recycle.core.plans.cuts import cuts_from_json, cuts_to_json, make_cuts
from recycle.core.plans.op_costs import OpCosts, slowed_us
from recycle.core.plans.plan import Plan
from recycle.core.plans.row_programs import RowProgram, row_programs
from recycle.core.plans.rules import check, layer_windows, period_us
from recycle.core.problem import Memory, Problem
from recycle.core.profile import Profile
from tests.builders import make_plan

SHAPE = Shape(1, 2, 2)
# Two layers a stage: F 10, I 10, W 10, so 5 a layer.
PROBLEM = Problem(Cluster(SHAPE), Profile.uniform(2, 10, 10, 10).with_equal_layers(4), shared_layers=1)
# Micro-batch 0 is cut at the boundary, micro-batch 1 a layer before it: stage 0 has one layer of it, stage 1 three.
CUTS = make_cuts([[0, -1]])
ROWS = {
    "W0_0": "0:0F0 10:0F1 40:0I0 50:0W0 60:0I1 65:0W1",
    "W0_1": "10:1F0 20:1I0 30:1F1 45:1I1 60:1W0 70:1W1",
}


def cut_plan(problem: Problem = PROBLEM, rows: dict[str, str] = ROWS) -> Plan:
    plan = replace(make_plan(problem, rows, period_us=1), cuts=CUTS)
    return replace(plan, period_us=period_us(plan))


def test_a_stage_computes_the_layers_between_two_cuts() -> None:
    costs = OpCosts(PROBLEM, CUTS)
    assert [[costs.layers(stage, chain) for stage in range(2)] for chain in range(2)] == [
        [range(2), range(2, 4)],
        [range(1), range(1, 4)],
    ]
    assert [costs.duration_us(Worker(0, stage), Kind.F, 1) for stage in range(2)] == [5, 15]


def test_a_slow_worker_takes_longer_rounded_up() -> None:
    problem = replace(PROBLEM, speeds=((Worker(0, 1), 0.6),))
    assert OpCosts(problem, CUTS).durations_us(Worker(0, 1), "FF", [0, 1]) == [17, 25]
    assert [slowed_us(9, 0.9), slowed_us(10, 0.9), slowed_us(10, 2.0), slowed_us(7, 2.0)] == [10, 12, 5, 4]


def test_a_legal_plan_with_cuts_breaks_no_rule() -> None:
    assert check(cut_plan()) == []


def test_the_file_of_a_plan_keeps_its_cuts() -> None:
    plan = cut_plan()
    assert '"cuts": [".A"]' in plan.dumps()
    assert Plan.parse(plan.dumps()) == plan
    assert "cuts" not in replace(plan, cuts=()).dumps()


def test_cuts_are_letters_in_the_file() -> None:
    shape = Shape(1, 3, 4)
    cuts = make_cuts([[0, 1, -2, 26], [0, 0, 0, 0]])
    assert cuts_to_json(cuts) == [".aBz", ""]
    assert cuts_from_json(cuts_to_json(cuts), shape) == cuts
    assert make_cuts([[0, 0], [0, 0]]) == ()
    for wrong in ([".aBz"], [".a", ""], [".aB1", ""], "....", [1, 2]):
        with pytest.raises(UserError):
            cuts_from_json(wrong, shape)


def test_a_file_with_other_cuts_is_not_a_usable_plan(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "plan.json"
    path.write_text(cut_plan().dumps().replace('".A"', '".A."'))
    with pytest.raises(FileProblem, match="cuts at boundary 1"):
        Plan.load(path)


def test_a_cut_outside_the_shared_layers_is_a_violation() -> None:
    plan = replace(cut_plan(), cuts=(array("b", [0, -2]),))
    assert {violation.rule for violation in check(plan)} == {"layers"}
    assert "cut -2 layers from boundary 1" in str(check(plan)[0])


def test_a_stage_without_a_layer_is_a_violation() -> None:
    problem = replace(PROBLEM, shared_layers=2)
    plan = replace(cut_plan(), problem=problem, cuts=(array("b", [0, -2]),))
    assert "stage 0 computes no layer of micro-batch 1@0" in str(check(plan)[0])


def test_a_plan_without_shared_layers_has_no_cuts() -> None:
    plan = replace(cut_plan(), problem=replace(PROBLEM, shared_layers=0))
    assert [violation.rule for violation in check(plan)] == ["layers"]


def test_ops_are_as_long_as_their_layers() -> None:
    rows = ROWS | {"W0_0": ROWS["W0_0"].replace("65:0W1", "64:0W1")}
    assert "W0_0 starts 0W1@0 at 64 µs, but 0I1@0 ends at 65 µs" in str(check(cut_plan(rows=rows))[0])


def test_activations_count_by_layer() -> None:
    held = Problem(PROBLEM.cluster, PROBLEM.profile, Memory.microbatches([2, 2]), shared_layers=1)
    assert OpCosts(held, CUTS).memory_deltas(Worker(0, 1), "FFIIWW", [0, 1] * 3) == [2, 3, 0, 0, -2, -3]
    found = check(cut_plan(held))
    assert [violation.rule for violation in found] == ["memory"]
    assert "W0_1 holds 5 layers of micro-batches when 1F1@0 starts at 30 µs, but may hold 4" in str(found[0])


def test_a_shared_layer_is_in_use_from_its_first_forward_to_its_last_gradient_at_any_stage() -> None:
    plan = cut_plan()
    # Layer 1 is computed at stage 0 for micro-batch 0, from 0 to 60, and at stage 1 for micro-batch 1, from 30 to 85.
    assert layer_windows(plan)[1] == (0, 85)
    # Layer 2 is computed at stage 1 alone.
    assert layer_windows(plan)[2] == (10, 85)
    assert period_us(plan) == 85  # the spans of the stages are 70 and 75


def test_without_cuts_no_layer_has_a_window_of_its_own() -> None:
    assert layer_windows(replace(cut_plan(), cuts=())) == {}


def test_a_row_program_says_which_layers_each_op_computes() -> None:
    programs = row_programs(cut_plan())
    program = programs[Worker(0, 1)]
    assert (program.kinds, program.first_layers, program.end_layers) == ("FIFIWW", (2, 2, 1, 1, 2, 1), (4,) * 6)
    assert RowProgram.parse(program.dumps()) == program
    uncut = row_programs(replace(cut_plan(), cuts=()))[Worker(0, 1)]
    assert (uncut.first_layers, uncut.end_layers) == ((), ())
    assert "layers" not in uncut.dumps()
