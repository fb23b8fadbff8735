"""`recycle check`: its sentences, its JSON and its exit codes."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

import recycle
from recycle.cli.planning.check import add_check_parser
from recycle.core.errors import FileProblem
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import check
from recycle.planner.model.lower_bound import lower_bound
from recycle.planner.solve import MOST_OPS_FOR_EXACT
from tests.plans import make_1f1b_plan, make_rerouted_plan


def run(plan: Plan, tmp_path: Path, *arguments: str) -> int:
    path = tmp_path / "plan.json"
    plan.save(path)
    return check_file(path, *arguments)


def check_file(path: Path, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_check_parser(parser.add_subparsers())
    args = parser.parse_args(["check", str(path), *arguments])
    return int(args.run(args) or 0)


def without_first_row(plan: Plan) -> Plan:
    return replace(plan, rows=plan.rows[1:])


def test_a_legal_plan_is_called_legal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(make_1f1b_plan(), tmp_path) == 0
    assert capsys.readouterr().out == "legal: period 27 µs, bound 27 µs (optimal), 144 ops on 12 workers\n"


def test_a_violation_is_named_with_its_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_rerouted_plan()
    assert run(replace(plan, period_us=15), tmp_path) == 1
    assert capsys.readouterr().out.splitlines() == [
        "not legal: 1 violation",
        "period: the plan claims a period of 15 µs, but its slots take 12 µs",
    ]


def test_at_most_twenty_violations_are_printed_then_a_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = without_first_row(make_1f1b_plan(2, 2, 30))
    violations = check(plan)
    assert len(violations) >= 30
    assert run(plan, tmp_path) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"not legal: {len(violations)} violations",
        *(f"{violation.rule}: {violation.message}" for violation in violations[:20]),
        f"and {len(violations) - 20} more",
    ]


def test_a_forged_bound_is_refuted_by_a_shorter_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = recycle.problem(3, 4, 6, fail="W1_2", costs="1,1,1", memory="4,3,2,1", techniques="adaptive")
    plan = recycle.solve(problem, "greedy", effort=1)
    assert plan.period_us > 36 == plan.quality.bound_us
    forged = replace(plan, quality=replace(plan.quality, bound_us=plan.period_us, status="optimal"))
    assert run(forged, tmp_path) == 1
    assert capsys.readouterr().out.splitlines() == [
        "not legal: 1 violation",
        f"bound: the bound is {plan.period_us} µs, but a plan with a period of 36 µs exists",
    ]


def test_a_bound_that_only_cp_sat_proves_is_proven_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = recycle.problem(1, 2, 4, costs="3,4,2", comm=1, memory=2)
    plan = recycle.solve(problem)
    assert plan.quality.status == "optimal"
    assert plan.quality.bound_us > lower_bound(problem)
    assert run(plan, tmp_path, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["bound_us"], facts["claimed_bound_us"], facts["status"]) == (plan.period_us, plan.period_us, "optimal")


def test_a_bound_that_no_method_can_prove_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = recycle.solve(recycle.problem(2, 2, 4, costs="4,5,3", memory=2, layers=4, shared_layers=1), "greedy", effort=1)
    assert plan.gap > 1
    forged = replace(plan, quality=replace(plan.quality, bound_us=plan.period_us, status="optimal"))
    assert run(forged, tmp_path) == 1
    assert f"but the problem proves {plan.quality.bound_us} µs and no more" in capsys.readouterr().out


def test_a_claim_of_a_large_plan_stays_open_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Too many ops for CP-SAT, so that nothing proves the forged bound, and nothing contradicts it.
    plan = recycle.solve(recycle.problem(60, 3, 7, fail="W1_1", costs="5,7,3", comm=2, memory=3), "greedy", effort=1)
    assert plan.num_ops > MOST_OPS_FOR_EXACT
    bound = plan.quality.bound_us
    assert plan.period_us > bound
    forged = replace(plan, quality=replace(plan.quality, bound_us=plan.period_us, status="optimal"))
    assert run(forged, tmp_path) == 0
    legal, claim = capsys.readouterr().out.splitlines()
    assert legal == f"legal: period {plan.period_us} µs, bound {bound} µs (feasible), {plan.num_ops} ops on 179 workers"
    assert f"claims a bound of {plan.period_us} µs that this check cannot prove; it proves {bound} µs" in claim
    assert claim.endswith(f"at most {plan.period_us / bound - 1:.2%} above the shortest one possible")
    assert run(forged, tmp_path, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["legal"], facts["claim_is_proven"], facts["status"]) == (True, False, "feasible")
    assert (facts["bound_us"], facts["claimed_bound_us"]) == (bound, plan.period_us)
    assert facts["ratio_to_bound"] == round(plan.period_us / bound, 6)


def test_a_bound_that_is_claimed_too_low_is_computed_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_1f1b_plan()
    assert run(replace(plan, quality=replace(plan.quality, bound_us=3, status="feasible")), tmp_path) == 0
    assert capsys.readouterr().out == "legal: period 27 µs, bound 27 µs (optimal), 144 ops on 12 workers\n"


def test_json_holds_the_verdict_and_every_violation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(make_rerouted_plan(), tmp_path, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {
        "legal": True,
        "period_us": 12,
        "bound_us": 12,
        "claimed_bound_us": 12,
        "claim_is_proven": True,
        "status": "optimal",
        "ratio_to_bound": 1.0,
        "num_ops": 24,
        "num_workers": 3,
        "violations": [],
    }
    assert run(without_first_row(make_1f1b_plan(2, 2, 30)), tmp_path, "--json") == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["legal"] is False
    missing = [violation for violation in printed["violations"] if violation["rule"] == "every op once"]
    assert len(missing) == 30
    assert missing[7]["message"].startswith("micro-batch 7@0 has nothing at stage 0")


def test_a_file_that_is_no_plan_is_a_problem_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{")
    with pytest.raises(FileProblem, match="is not JSON"):
        check_file(path)
