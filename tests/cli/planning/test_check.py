"""`recycle check`: its sentences, its JSON and its exit codes."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from recycle.cli.planning.check import add_check_parser
from recycle.core.errors import FileProblem
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import check
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


def test_json_holds_the_verdict_and_every_violation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(make_rerouted_plan(), tmp_path, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {
        "legal": True,
        "period_us": 12,
        "bound_us": 12,
        "status": "optimal",
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
