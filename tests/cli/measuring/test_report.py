"""`recycle report`: its text, its files and its refusals."""

import argparse
import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from recycle.cli.measuring.report import add_report_parser
from recycle.cli.measuring.report_text import curve
from recycle.core.errors import UserError
from recycle.core.events.record import Event, Held, LinkChanged, OpRan, Placed, Recovered, SpeedChanged, Spell, Started, Stepped
from recycle.core.events.record_file import plan_file, write_record
from recycle.core.plans.plan import Plan
from recycle.sim.replay.replay import Conditions, replay
from tests.plans import costly_profile, make_1f1b_plan, make_rerouted_plan
from tests.recovery_records import SAMPLES, degraded_plan, played, recovery_record, whole_plan
from tests.run_records import Training, training_record

PLAN = make_rerouted_plan(profile=costly_profile(2))
EVENTFUL = Training(12, clipped=(3, 5), skipped=(7,), taken_back=(5,), saved=(5, 11), warned=(9,))


def save_run(folder: Path, events: list[Event], summary: dict[str, Any] | None = None) -> None:
    folder.mkdir(exist_ok=True)
    PLAN.save(folder / "plan.json")
    write_record(folder / "record.jsonl", events)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a run that ended, one that was cut off, and the record of a replay."""
    monkeypatch.chdir(tmp_path)
    save_run(Path("run"), training_record(PLAN, EVENTFUL), {"steps": 12, "weights_sha256": "c0ffee"})
    whole = [event for event in training_record(PLAN, EVENTFUL) if not isinstance(event, Held)]
    save_run(Path("cut"), whole[: len(whole) - 10])
    played = replay(PLAN, Conditions(num_iterations=6))
    write_record("replayed.jsonl", [Started("replay", "plan.json"), *played.events()])
    return tmp_path


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


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(*arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def facts(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    known = json.loads(printed(capsys, *arguments, "--json"))
    assert isinstance(known, dict)
    return known


def test_the_numbers_are_above_the_charts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "run")
    assert "run        train of 8-layer GPT, to its end; weights sha256 c0ffee" in out
    assert "steps      12; loss 5.5000 at the first, " in out
    assert "           1 skipped, 2 clipped, 1 taken back" in out
    assert "           2 ops ran in vain, 12.5 ms of all workers together, and were run again" in out
    assert re.search(r"(?m)^speed      \d+(\.\d+)? samples/s, the median$", out)
    assert re.search(
        r"(?m)^iteration  [\d.]+ ms, the median of 11; [\d.]+ ms at the 10th percentile, [\d.]+ ms at the 90th$", out
    )
    assert re.search(
        r"(?m)^plan       at the speed at which ops ran the plan promises [\d.]+ ms: the iteration takes \d\.\d{3} ", out
    )
    assert re.search(r"(?m)^bubbles    [\d.]+% of the workers' time as executed, [\d.]+% as planned; from .* \(W\d_\d\) to ", out)
    assert re.search(r"(?m)^time       [\d.]+ s in all: busy [\d.]+%, bubble [\d.]+%, start [\d.]+%$", out)
    assert re.search(r"(?m)^           W0_0 +381.5 MiB +5.2 MiB +4.8 MiB +110%$", out)
    assert "saved      step 6 at " in out
    assert re.search(r"(?m)^warnings   at [\d.]+ m?s: step 10 took twice as long as the one before$", out)
    assert "missing" not in out


def test_an_iteration_is_drawn_as_executed_and_below_it_as_planned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    upper, below = printed(capsys, "run", "--iteration", "4").split("as planned ·")
    assert "iteration 4 as executed · 2 pipelines × 2 stages" in upper
    for chart in (upper, below):
        assert re.search(r"(?m)^W0_1 .*▕F0.*f0.*▏", chart)
        assert re.search(r"(?m)^W1_1 .*dead", chart)
    assert "a period of " in below


def test_the_loss_is_drawn_as_a_curve_that_falls(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "run").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("loss  "))
    rows = [line.partition("│")[2] for line in lines[first : first + 7]]
    columns = [next(place for place, letter in enumerate(row) if letter != " ") for row in rows if row]
    assert columns == sorted(columns)
    assert lines[first].split()[1] == "5.5"
    assert re.search(r" 0 +11  iteration$", lines[first + 7])


def test_the_curve_of_known_values_is_drawn_dot_by_dot() -> None:
    """Four dots up in four columns of dots: one straight line through two letters."""
    assert curve([0, 1, 2, 3], 2, 1) == ["⡠⠊"]
    assert curve([5, 5, 5], 2, 1) == ["⠒⠒"]
    assert curve([3, 3, 0, 0], 2, 1) == ["⠉⣆"]  # down at once, without a hole
    assert curve([0, 2, 4, 6, 3, 3], 1, 1) == curve([2, 4], 1, 1)  # means of three


def test_the_facts_agree_with_what_happened(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = facts(capsys, "run")
    assert known["steps"]["count"] == 12
    assert known["steps"]["taken_back"] == [5]
    assert known["ended"] is True
    assert known["weights_sha256"] == "c0ffee"
    assert [one["steps"] for one in known["checkpoints"]] == [6, 12]
    assert known["iterations"] == {"first": 0, "last": 11, "whole": 12, "other_plans": 0}
    assert 0 < known["drawn_iteration"] < 11
    assert facts(capsys, "run", "--iteration", "7")["drawn_iteration"] == 7


def test_a_run_that_was_cut_off_is_reported_as_far_as_it_went(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "cut")
    assert "which goes on or was cut off: there is no summary.json" in out
    assert "missing    the record holds no memory" in out
    known = facts(capsys, "cut")
    assert known["ended"] is False
    assert known["iterations"]["last"] == 10


def test_a_last_line_that_was_cut_in_the_middle_is_left_out_and_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("cut/record.jsonl")
    before = facts(capsys, "cut")
    path.write_bytes(path.read_bytes() + b'{"event":"op","iterat')
    assert run("cut", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {**before, "gaps": ["its last line is cut off"]}


def test_a_run_that_was_resumed_has_not_ended_with_its_old_summary(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run/summary.json").write_text('{"steps": 6}', encoding="utf-8")
    assert "cut off: summary.json is from before it was resumed" in printed(capsys, "run")
    assert facts(capsys, "run")["ended"] is False


def test_a_replayed_record_says_what_it_does_not_hold(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "replayed.jsonl", "--plan", "run/plan.json")
    assert "run        replay of plan.json, from replayed.jsonl" in out
    assert "iterations 6 whole ones, 0 to 5" in out
    assert "the iteration takes 1.000 times that" in out
    assert "missing    the record holds no losses, no samples and no memory" in out
    assert "loss  " not in out
    known = facts(capsys, "replayed.jsonl", "--plan", "run/plan.json")
    assert known["plan"]["over_promise"] == 1
    assert known["iteration_us"]["median"] == PLAN.period_us
    assert known["bubble_share"]["executed"] == known["bubble_share"]["planned"]


def test_a_record_finds_the_plan_that_lies_beside_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert facts(capsys, "run/record.jsonl")["steps"]["count"] == 12


def test_files_are_written_and_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"--png": "a.png", "--svg": "a.svg", "--perfetto": "a.json"}
    out = printed(capsys, "run", *(text for option, name in names.items() for text in (option, f"deep/{name}")))
    assert all(f"wrote deep/{name}" in out for name in names.values())
    assert Path("deep/a.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert "as executed" in Path("deep/a.svg").read_text(encoding="utf-8")
    trace = json.loads(Path("deep/a.json").read_text(encoding="utf-8"))["traceEvents"]
    ran = [event for event in training_record(PLAN, EVENTFUL) if isinstance(event, OpRan)]
    assert sum(event["ph"] == "X" and event["name"] != "dead" for event in trace) == len(ran)


def test_memory_of_many_workers_is_shown_by_stage_and_rows_may_be_all(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = make_1f1b_plan(12, 4, 4, costly_profile(4))
    Path("wide").mkdir()
    wide.save("wide/plan.json")
    write_record("wide/record.jsonl", training_record(wide, Training(3)))
    out = printed(capsys, "wide")
    assert "memory     of each stage the fullest of 48 workers" in out
    assert out.count("8 of 48 workers are not shown") == 2
    assert len(re.findall(r"(?m)^W\d+_\d +▕", printed(capsys, "wide", "--rows", "all"))) == 96


def test_workers_are_listed_with_their_hosts_and_processes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "workers    " not in printed(capsys, "run")
    placed = [Placed(5, "W1_0", "a", 4711), Placed(7, "W0_1", "b", 12), Placed(2_000_000, "W1_0", "b", 13)]
    save_run(folder / "run", [*training_record(PLAN, EVENTFUL), *placed])
    found = re.search(r"(?m)^workers    worker +host +pid +from\n((?: {11}.*\n)+)", printed(capsys, "run"))
    assert found is not None
    rows = [line.split() for line in found[1].splitlines()]
    assert rows == [["W0_1", "b", "12", "7", "µs"], ["W1_0", "a", "4711", "5", "µs"], ["W1_0", "b", "13", "2", "s"]]
    assert facts(capsys, "run")["workers"][0] == {"worker": "W1_0", "host": "a", "pid": 4711, "at_us": 5}
    save_run(folder / "run", [*training_record(PLAN, EVENTFUL), *(Placed(n, "W1_0", "a", n) for n in range(20))])
    assert "and 4 more; --json lists all" in printed(capsys, "run")


def test_many_warnings_and_checkpoints_are_cut_short(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = tuple(range(12))
    save_run(Path("noisy"), training_record(PLAN, Training(12, saved=every, warned=every)))
    out = printed(capsys, "noisy")
    assert "and 4 more; --json lists all" in out
    assert "saved      8 before these" in out
    assert len(facts(capsys, "noisy")["warnings"]) == 12


def save_later(folder: Path, plans: dict[int, Plan]) -> None:
    for iteration, plan in plans.items():
        plan.save(folder / plan_file(iteration))


def save_recovered(folder: Path) -> None:
    save_run(folder, recovery_record(), {"steps": 14})
    whole_plan().save(folder / "plan.json")
    save_later(folder, {5: degraded_plan(), 9: whole_plan()})


def test_a_run_with_recoveries_lists_them_below_where_the_time_went(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_recovered(Path("failed"))
    out = printed(capsys, "failed")
    assert "           10 iterations were executed by this plan, 4 by plans of other epochs" in out
    assert re.search(r"(?m)^time .* regroup [\d.]+%, start [\d.]+%, abort [\d.]+%, transfer [\d.]+%, detect [\d.]+%$", out)
    assert "recoveries 2, which cost 201 ms; 1 left, 1 joined" in out
    assert re.search(r"(?m)^           W1_1 left +6 +156 ms +3 ms +41 ms +- +92 ms +- +20 ms  its connection closed; ", out)
    assert re.search(r"(?m)^           W1_1 joined +10 +45 ms +- +- +- +30 ms +15 ms +-  it asked to join$", out)
    assert "as executed · 2 pipelines" in out
    known = facts(capsys, "failed")
    assert [one["worker"] for one in known["recoveries"]] == ["W1_1", "W1_1"]
    assert known["run"]["failures"] == known["run"]["joins"] == 1


def test_slow_workers_are_listed_with_their_speed_and_since_when(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = [SpeedChanged(5, "W1_1", 0.6, 2), SpeedChanged(9, "W1_1", 1.0, 9)]
    save_run(Path("slow"), [*recovery_record(), *changes], {"steps": 14})
    whole_plan().save(Path("slow") / "plan.json")
    save_later(Path("slow"), {5: degraded_plan(), 9: whole_plan()})
    out = printed(capsys, "slow")
    assert "speeds     W1_1 is slow: 0.6 of its peers' speed, since step 3" in out
    assert "           W1_1 runs at its peers' speed again, since step 10" in out
    assert [(one["worker"], one["speed"], one["step"]) for one in facts(capsys, "slow")["speeds"]] == [
        ("W1_1", 0.6, 3),
        ("W1_1", 1.0, 10),
    ]


def test_slow_links_are_listed_with_their_times_and_since_when(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = [LinkChanged(5, "W1_0-W1_1", 0.05, 2, 20_000, 1_000), LinkChanged(9, "W1_0-W1_1", 1.0, 9, 1_000, 1_000)]
    save_run(Path("slow"), [*recovery_record(), *changes], {"steps": 14})
    whole_plan().save(Path("slow") / "plan.json")
    save_later(Path("slow"), {5: degraded_plan(), 9: whole_plan()})
    out = printed(capsys, "slow")
    assert "links      the link W1_0-W1_1 is slow: a message takes 20.00 ms, 20 times as long as on others, since step 3" in out
    assert "           the link W1_0-W1_1 is as fast as others again, since step 10" in out
    first, second = facts(capsys, "slow")["links"]
    assert first == {"link": "W1_0-W1_1", "speed": 0.05, "step": 3, "time_us": 20_000, "usual_us": 1_000, "at_us": 5}
    assert (second["speed"], second["step"]) == (1.0, 10)


def without_lines(first: int, last: int, folder: Path) -> None:
    lines = (folder / "record.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "record.jsonl").write_text("".join([*lines[: first - 1], *lines[last:]]), encoding="utf-8")


def without_numbers_and_step(step: int, folder: Path) -> None:
    """As a record of an earlier release, and without one of its steps."""
    lines = (folder / "record.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if f'"step","iteration":{step - 1},' not in line]
    (folder / "record.jsonl").write_text("".join(re.sub(r',"line":\d+}', "}", line) for line in kept), encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "gap"),
    [
        (partial(without_lines, 20, 20), "line 20 is missing"),
        (partial(without_lines, 20, 22), "lines 20 to 22 are missing"),
        (partial(without_lines, 200, 999), "it ends with step 5, but summary.json is of a run of 14 steps"),
        (partial(without_numbers_and_step, 4), "it has no step 4"),
        (lambda folder: (folder / plan_file(5)).unlink(), "the plan of steps 6 to 9 is missing in plans/"),
        (lambda folder: (folder / plan_file(9)).unlink(), "the plan of steps 10 to 14 is missing in plans/"),
        (lambda folder: (folder / plan_file(9)).write_bytes(b"{"), "the plan of steps 10 to 14 is missing in plans/"),
        (lambda folder: shutil.rmtree(folder / "plans"), "the plan of steps 6 to 9 is missing in plans/"),
    ],
)
def test_a_run_of_which_something_is_missing_is_reported_with_a_sentence_on_that(
    folder: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], gap: str
) -> None:
    save_recovered(Path("failed"))
    assert facts(capsys, "failed")["gaps"] == []
    damage(Path("failed"))
    assert run("failed") == 0
    captured = capsys.readouterr()
    assert captured.err == f"recycle report: warning: the record of this run is not whole: {gap}\n"
    assert f"not whole  the record of this run is not whole: {gap}\n" in captured.out


def test_a_run_with_recoveries_is_shown_by_any_of_its_plans(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_recovered(Path("failed"))
    degraded_plan().save("degraded.json")
    out = printed(capsys, "failed", "--plan", "degraded.json", "--iteration", "6")
    assert "iteration 6 as executed" in out
    assert "4 iterations were executed by this plan, 10 by plans of other epochs" in out


def test_any_iteration_is_drawn_beside_the_plan_of_its_epoch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_recovered(Path("failed"))
    found_again = replace(whole_plan(), quality=replace(whole_plan().quality, seconds=7.5))
    save_later(Path("failed"), {5: degraded_plan(), 9: found_again})
    assert facts(capsys, "failed")["plan_file"] == "failed/plan.json"
    for iteration, is_degraded in ((2, False), (6, True), (11, False)):
        out = printed(capsys, "failed", "--iteration", str(iteration))
        assert f"iteration {iteration} as executed" in out
        assert len(re.findall(r"(?m)^W1_1 .*dead", out)) == (2 if is_degraded else 0)  # as executed, and as planned
        counts = ("4", "10") if is_degraded else ("10", "4")
        assert "{} iterations were executed by this plan, {} by plans of other epochs".format(*counts) in out
    known = facts(capsys, "failed", "--iteration", "6", "--svg", "a.svg", "--png", "a.png")
    assert known["plan_file"] == "failed/plans/from-iteration-5.json"
    assert known["iteration_us"]["median"] == degraded_plan().period_us


def test_a_run_whose_worker_died_in_the_first_step_is_shown_by_its_second_plan(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(Path("early"), died_in_the_first_step())
    whole_plan().save("early/plan.json")
    assert run("early") == 12  # it was recorded without later plans
    assert "no iteration of this record was executed by this plan" in capsys.readouterr().err
    save_later(Path("early"), {0: degraded_plan()})
    known = facts(capsys, "early")
    assert known["plan_file"] == "early/plans/from-iteration-0.json"
    assert known["iterations"] == {"first": 0, "last": 3, "whole": 4, "other_plans": 0}
    assert known["plan"]["over_promise"] == pytest.approx(1)
    assert "iteration 0 as executed" in printed(capsys, "early", "--iteration", "0")
    assert "in all" in printed(capsys, "early", "--against-simulation")


def died_in_the_first_step() -> list[Event]:
    """W1_1 dies when the first ops have run, and the others do four steps."""
    begun, _, _ = played(whole_plan(), 0, 1, 1000)
    discarded: list[Event] = [structs.replace(op, is_in_vain=True) for op in begun[:3]]
    death_us = max(op.end_us for op in begun[:3])
    left = Recovered(death_us, death_us + 700, 2, ("W1_1",), False, "killed", 0, regroup_us=700, redo_us=death_us - 1000)
    ran, steps, _ = played(degraded_plan(), 0, 4, left.end_us)
    return [Started("train", "early"), *discarded, left, *ran, *steps]


def test_samples_of_steps_that_were_repeated_from_a_checkpoint_count_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, first_steps, end_us = played(whole_plan(), 0, 5, 0)
    back = Recovered(end_us, end_us + 700, 2, ("W1_1",), False, "killed", 2, regroup_us=700, redo_us=3 * whole_plan().period_us)
    again, again_steps, _ = played(degraded_plan(), 2, 6, back.end_us)
    pause = Spell(end_us, back.end_us, "pause", "regroup")
    save_run(Path("back"), [Started("train", ""), *first, *first_steps, pause, back, *again, *again_steps])
    whole_plan().save("back/plan.json")
    save_later(Path("back"), {2: degraded_plan()})
    known = facts(capsys, "back", "--against-simulation")
    assert (known["run"]["samples"], known["run"]["redone_samples"]) == (6 * SAMPLES, 3 * SAMPLES)
    assert known["run"]["time_us"]["redo"] == known["lost_us"]["redo"] == 3 * whole_plan().period_us
    assert known["iterations"] == {"first": 0, "last": 1, "whole": 2, "other_plans": 4}
    assert known["against_simulation"]["redo_us"] == 0, "they are steps of their epoch"
    assert known["against_simulation"]["total_us"]["measured"] == known["run"]["time_us"]["total"]


def test_the_trace_of_a_run_with_recoveries_has_all_its_epochs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_recovered(Path("failed"))
    printed(capsys, "failed", "--perfetto", "trace.json", "--png", "page.png")
    trace = json.loads(Path("trace.json").read_text(encoding="utf-8"))["traceEvents"]
    slices = [event for event in trace if event["ph"] == "X" and event["cat"] not in ("dead", "recovery")]
    assert len(slices) == sum(isinstance(event, OpRan) for event in recovery_record())
    assert any(event["name"] == "regroup" for event in trace)


def test_many_recoveries_are_cut_short(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = [Recovered(0, 0, number, ("W1_1",), False, "silent for 2.0 s", 14) for number in range(30)]
    save_run(Path("restless"), [*training_record(PLAN, Training(12)), *many])
    out = printed(capsys, "restless")
    assert out.count("silent for 2.0 s") == 12
    assert "           and 18 more; --json lists all" in out
    assert len(facts(capsys, "restless")["recoveries"]) == 30


def test_a_terminal_with_ascii_only_gets_ascii_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
        assert run("run") == 0
        sys.stdout.flush()
        text = raw.getvalue().decode("ascii")
    assert "|***" in text
    assert "us" in text


WRONG = {
    "nothing there": ("nowhere", r"cannot read nowhere: there is no such folder or file; give the folder of a run"),
    "not a run": (
        "empty",
        r"empty is not the folder of a run: it has no record.jsonl; give one that 'recycle train --out' wrote",
    ),
    "no plan in the folder": ("planless", r"there is no planless/plan.json; give its plan with --plan FILE"),
    "a record without a plan": ("replayed.jsonl", r"there is no plan.json; give its plan with --plan FILE"),
    "a plan that is not there": ("run --plan none.json", r"there is no none.json; give its plan with --plan FILE"),
    "another kind of file": ("run/plan.json", r"run/plan.json is not a recycle-record file"),
    "a plan that is none": ("run --plan run/record.jsonl", r"run/record.jsonl is not JSON"),
    "an illegal plan": ("run --plan illegal.json", r"illegal.json is not a legal plan, so nothing can be held against it"),
    "an empty record": ("empty.jsonl --plan run/plan.json", r"empty.jsonl: the record is empty: it holds no op"),
    "another plan": ("run --plan other.json", r"run/record.jsonl: W1_0 ran ops in this record, but the plan has no row for it"),
    "unknown iteration": ("run --iteration 12", r"iteration 12 is not in the record; whole are 0 to 11"),
    "negative iteration": ("run --iteration -1", r"iteration -1 is not in the record; whole are 0 to 11"),
    "iteration cut off": ("cut --iteration 11", r"iteration 11 is not whole in the record: the run was cut off in it"),
    "a corrupt line": ("corrupt.jsonl --plan run/plan.json", r"corrupt.jsonl, line 2: this is not an event of a record"),
    "a corrupt number": (
        "odd.jsonl --plan run/plan.json",
        r"odd.jsonl, line \d+: the event 'step' is not whole: Expected `float \| null`, got `str` - at `\$.loss`",
    ),
    "a corrupt summary": ("torn", r"cannot read torn/summary.json .*: remove it, and the report does without"),
    "picture of another kind": ("run --png a.svg", r"cannot write a.svg: it would be a .png file"),
    "picture into a folder": ("run --png run", r"cannot write run: it is a folder"),
    "trace below a file": ("run --perfetto run/plan.json/a", r"cannot write run/plan.json/a"),
}


@pytest.mark.parametrize(("arguments", "sentence"), WRONG.values(), ids=WRONG)
def test_unusable_input_is_refused_in_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, sentence: str
) -> None:
    Path("empty").mkdir()
    save_run(Path("planless"), training_record(PLAN, Training(2)))
    Path("planless/plan.json").unlink()
    save_run(Path("torn"), training_record(PLAN, Training(2)))
    Path("torn/summary.json").write_text("{", encoding="utf-8")
    write_record("empty.jsonl", [Started("train", "nothing")])
    write_record("odd.jsonl", [Stepped(0, 1, "x", 1.0, 1.0)])  # type: ignore[arg-type]
    Path("corrupt.jsonl").write_text('{"format": "recycle-record", "version": 1}\n{"event": "what"}\n\n', encoding="utf-8")
    make_1f1b_plan(1, 2, 2).save("other.json")
    text = PLAN.dumps()
    Path("illegal.json").write_text(text.replace(f'"period_us": {PLAN.period_us}', '"period_us": 5'), encoding="utf-8")
    before = sorted(folder.rglob("*"))
    assert run(*arguments.split()) in (2, 12)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert re.search(sentence, captured.err), captured.err
    assert sorted(folder.rglob("*")) == before


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--help")
    out = capsys.readouterr().out
    assert "recycle report runs/a --png page.png" in out
    assert "--iteration" in out
