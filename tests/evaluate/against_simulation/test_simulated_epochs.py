"""Simulated runs, with any failures, must be predicted to the microsecond."""

import argparse
import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from msgspec import structs

from recycle.cli.measuring.report import add_report_parser
from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.events.record import Event, OpRan, Recovered, Spell, Started
from recycle.core.events.record_file import write_record
from recycle.core.plans.library import without_failures
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import PlanAssignment
from recycle.core.profile import Profile
from recycle.evaluate.against_simulation.simulated_epochs import against_simulation, read_constants
from recycle.planner.live_planner import Planner
from recycle.planner.solve import solve
from recycle.report.record.run_columns import read_run_record
from recycle.sim.replay.replay import Conditions, replay
from recycle.sim.systems.constants import RecycleConstants
from tests.builders import make_problem
from tests.plans import costly_profile, make_1f1b_plan
from tests.random_plans import legal_plans
from tests.recovery_records import recovery_record, whole_plan

NO_PAUSES = RecycleConstants(0, 0, 0, 0, 0)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def made_plan(techniques: str = "adaptive,decoupled,staggered") -> Plan:
    """What the planner makes for 3 pipelines of 2 stages with 4 micro-batches, all alive, from costs that are no real ones."""
    return solve(make_problem(3, 2, 4, costs=(10, 13, 9), techniques=techniques), "greedy", effort=20_000)


def ran(plan: Plan, first: int, num_steps: int, at_us: int, profile: Profile | None = None, **how: Any) -> list[OpRan]:
    """Steps by a plan as a runtime plays it, from an empty pipeline on: rows alone drive, whatever the plan's clock says."""
    rows = tuple(replace(row, starts_us=array("q", [0] * len(row))) for row in plan.rows)
    real = replace(plan, rows=rows, problem=replace(plan.problem, profile=profile or plan.problem.profile))
    events = replay(real, Conditions(num_steps, eager=True, **how)).events()
    return [
        structs.replace(op, iteration=op.iteration + first, start_us=op.start_us + at_us, end_us=op.end_us + at_us)
        for op in events
    ]


def end_of(ops: Sequence[OpRan]) -> int:
    return max(op.end_us for op in ops)


def degraded(plan: Plan) -> PlanAssignment:
    """The planner's assignment when W1_1 is dead: staggered no worker moves, synchronous W2_0 moves to that place."""
    return Planner(without_failures(plan.problem), given=plan).answer(frozenset({Worker(1, 1)}))


def failing_record(plan: Plan, profile: Profile) -> list[Event]:
    """6 steps with all workers, 7 without W1_1, 5 with a worker that joined at the empty place; op times are from `profile`."""
    answer = degraded(plan)
    moves, empty = (f"{now}>{place}" for now, place in answer.moves), map(str, answer.plan.problem.cluster.failed)
    first = ran(plan, 0, 6, 1000, profile)
    left = Recovered(end_of(first) + 900, end_of(first) + 1600, 2, ("W1_1",), False, "dead", 6, 100, 200, 0, 400, 0, 900)
    second = ran(answer.plan, 6, 7, left.end_us, profile)
    joined = Recovered(end_of(second), end_of(second) + 500, 3, tuple(empty), True, "it asked to join", 13, regroup_us=500)
    third = ran(plan, 13, 5, joined.end_us, profile)
    redo = Spell(end_of(first), left.at_us, "redo", "failure")
    return [Started("train", "a GPT"), *first, redo, structs.replace(left, moves=tuple(moves)), *second, joined, *third]


@pytest.mark.parametrize(
    ("techniques", "empty"), [("adaptive,decoupled,staggered", Worker(1, 1)), ("adaptive,decoupled", Worker(2, 0))]
)
@pytest.mark.timeout(120)
def test_a_simulated_run_with_a_failure_and_a_return_is_predicted_exactly(techniques: str, empty: Worker) -> None:
    plan = made_plan(techniques)
    record = failing_record(plan, costly_profile(2))
    compared = against_simulation(read_run_record(record), plan, NO_PAUSES)
    assert [(one.first_step, one.last_step, one.dead) for one in compared.epochs] == [
        (1, 6, ()),
        (7, 13, (empty,)),
        (14, 18, ()),
    ]
    assert all(one.is_planned for one in compared.epochs)
    assert [one.predicted for one in compared.epochs] == [one.measured for one in compared.epochs]
    times = [one.measured.iteration_us for one in compared.epochs]
    assert times[0] == times[2] != times[1]


@pytest.mark.timeout(120)
def test_the_whole_run_takes_as_long_as_its_parts() -> None:
    record = failing_record(made_plan(), costly_profile(2))
    ops = [event for event in record if isinstance(event, OpRan)]
    compared = against_simulation(read_run_record(record), made_plan(), read_constants(["recycle.detect=2s", "recycle.plan=0s"]))
    assert compared.total_us[1] == end_of(ops) - 1000
    assert [one.predicted_us for one in compared.pauses] == [2_000_000 + 500_000 + 5_000_000, 5_000_000]
    assert [one.measured_us for one in compared.pauses] == [700, 500]
    assert compared.total_us[0] - compared.total_us[1] == 12_500_000 - 1200


@QUICK
@given(legal_plans())
def test_whatever_plan_was_played_is_predicted_exactly(plan: Plan) -> None:
    for num_steps in (1, 4):
        record = ran(plan, 3, num_steps, 50)
        (epoch,) = against_simulation(read_run_record(record), plan, NO_PAUSES).epochs
        assert epoch.predicted == epoch.measured
        assert epoch.num_steps == num_steps


@pytest.mark.timeout(120)
def test_workers_that_moved_are_asked_for_where_they_were() -> None:
    """All of stage 1 die, so that a worker of stage 0 takes over there, from the last checkpoint: after step 2 of 4."""
    plan = solve(make_problem(2, 2, 4, costs=(10, 13, 9)), "greedy", effort=20_000)
    answer = Planner(plan.problem).answer(frozenset({Worker(0, 1), Worker(1, 1)}))
    moves = tuple(f"{now}>{place}" for now, place in answer.moves)
    first = ran(plan, 0, 4, 0)
    left = Recovered(end_of(first), end_of(first) + 70, 2, ("W0_1", "W1_1"), False, "dead", 2, regroup_us=70, moves=moves)
    second = ran(answer.plan, 2, 5, left.end_us)
    compared = against_simulation(read_run_record([*first, left, *second]), plan, RecycleConstants())
    before, after = compared.epochs
    assert moves
    assert (after.first_step, after.last_step) == (3, 7)
    assert after.dead == tuple(sorted(answer.plan.problem.cluster.failed))
    assert after.is_planned
    assert [one.predicted for one in (before, after)] == [one.measured for one in (before, after)]
    assert compared.pauses[0].predicted_parts_us["restart"] == RecycleConstants().restart_us


def test_a_newcomer_and_a_mover_copy_the_state_of_their_stage() -> None:
    plan = make_1f1b_plan(2, 2, 2, replace(costly_profile(2), stages=static_stages(8_000_000)))
    first = ran(plan, 0, 3, 0)
    joined = Recovered(end_of(first), end_of(first) + 500, 2, ("W1_1",), True, "it asked to join", 3, transfer_us=500)
    compared = against_simulation(read_run_record([*first, joined, *ran(plan, 3, 3, joined.end_us)]), plan, NO_PAUSES)
    assert compared.pauses[0].predicted_parts_us == {"plan": 0, "regroup": 0, "transfer": 20 + 8_000_000 // 20_000}


def static_stages(size_bytes: int) -> tuple[Any, ...]:
    return tuple(replace(stage, static_bytes=size_bytes) for stage in costly_profile(2).stages)


def test_a_plan_that_the_planner_does_not_make_is_played_as_recorded() -> None:
    compared = against_simulation(read_run_record(recovery_record()), whole_plan(), NO_PAUSES)
    assert [one.is_planned for one in compared.epochs] == [True, False, True]
    assert [one.predicted for one in compared.epochs] == [one.measured for one in compared.epochs]


def test_ops_that_vary_make_a_run_longer_than_their_mean_and_that_is_predicted() -> None:
    plan = make_1f1b_plan(3, 4, 6, costly_profile(4))
    steady, varied = (
        against_simulation(read_run_record(ran(plan, 0, 30, 0, jitter=jitter, seed=99)), plan, NO_PAUSES).epochs[0]
        for jitter in (0.0, 0.3)
    )
    assert varied.measured.total_us > 1.1 * steady.measured.total_us
    assert varied.predicted.total_us == pytest.approx(varied.measured.total_us, rel=0.03)


def test_of_many_steps_the_last_stand_for_those_that_are_not_played() -> None:
    plan = make_1f1b_plan(1, 2, 2, costly_profile(2))
    (epoch,) = against_simulation(read_run_record(ran(plan, 0, 200, 0)), plan, NO_PAUSES).epochs
    assert epoch.predicted == epoch.measured
    assert epoch.num_steps == 200


def test_a_record_without_a_complete_iteration_is_refused() -> None:
    plan = whole_plan()
    for record in ([], ran(plan, 0, 1, 0)[:5]):
        with pytest.raises(UserError, match="no whole iteration, so there is nothing to compare with a simulation"):
            against_simulation(read_run_record(record), plan, NO_PAUSES)


def run(*arguments: str) -> int:
    """Run `recycle report` with these arguments; errors are printed as by `main`."""
    parser = argparse.ArgumentParser(prog="recycle")
    add_report_parser(parser.add_subparsers(dest="command"))
    args = parser.parse_args(["report", *arguments])
    try:
        return int(args.run(args) or 0)
    except UserError as problem:
        print(f"recycle report: {problem}", file=sys.stderr)
        return problem.exit_code


@pytest.fixture
def failed(tmp_path: Path) -> Path:
    """The folder of a run with a failure and a return."""
    folder = tmp_path / "failed"
    folder.mkdir()
    whole_plan().save(folder / "plan.json")
    write_record(folder / "record.jsonl", recovery_record())
    return folder


def test_the_report_ends_with_the_simulation(failed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(failed), "--against-simulation", "--set", "recycle.regroup=92ms") == 0
    out = capsys.readouterr().out
    known = against_simulation(read_run_record(recovery_record()), whole_plan(), read_constants(["recycle.regroup=92ms"]))
    assert out.endswith("\n".join(known.lines()) + "\n")
    assert "           6-9      W1_1            110.22 ms  110.22 ms  1.000             110.22 ms  110.22 ms  1.000\n" in out


def test_scripts_get_the_same_numbers(failed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(failed), "--against-simulation", "--json") == 0
    facts = json.loads(capsys.readouterr().out)["against_simulation"]
    assert [one["ratio"] for one in facts["epochs"]] == [1, 1, 1]
    assert [one["predicted_us"]["total"] for one in facts["recoveries"]] == [7_000_000, 5_500_000 + 20]
    assert facts["measured_constants_us"] == {"detect": 3000, "abort": 41_000, "plan": 0, "regroup": 92_000}
    assert run(str(failed), "--json") == 0
    assert "against_simulation" not in json.loads(capsys.readouterr().out)


WRONG = {
    "a constant without a simulation": (
        ["--set", "recycle.detect=1s"],
        2,
        "--set is for a simulation: give --against-simulation",
    ),
    "a constant of another system": (
        ["--against-simulation", "--set", "oobleck.reconfigure=57s"],
        2,
        "'oobleck.reconfigure=57s' is no constant of a recovery: write recycle.name=value, such as recycle.detect=50ms",
    ),
    "an unknown constant": (["--against-simulation", "--set", "recycle.luck=1s"], 2, "'recycle.luck' is not a constant"),
    "another plan": (
        ["--against-simulation", "--plan", "other.json"],
        12,
        "no iteration of this record was executed by this plan",
    ),
    "no ops": (["--against-simulation", "--plan", "failed/plan.json"], 2, "the record is empty: it holds no op"),
}


@pytest.mark.parametrize(("arguments", "code", "sentence"), WRONG.values(), ids=WRONG)
def test_unusable_input_is_refused_in_a_sentence(
    failed: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    sentence: str,
) -> None:
    monkeypatch.chdir(failed.parent)
    make_1f1b_plan(1, 2, 2).save("other.json")
    write_record("empty.jsonl", [Started("train", "nothing")])
    assert run("empty.jsonl" if "no op" in sentence else "failed", *arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert sentence in captured.err
