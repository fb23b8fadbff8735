"""`recycle plan`, and what every command says about itself."""

import json
import shlex
from pathlib import Path

import pytest

from recycle.cli.main import main
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import check

EXAMPLE = "plan --pipelines 3 --stages 4 --microbatches 6 --fail W1_2 --costs 1,1,1 --memory 6"
ANY_TWO = "plan --pipelines 3 --stages 4 --microbatches 6 --failures 2 --costs 1,1,1 --memory 8"


def output(capsys: pytest.CaptureFixture[str], command: str) -> str:
    """What `recycle <command>` prints; it must end well and complain about nothing."""
    assert main(shlex.split(command)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_json_is_one_object_with_what_scripts_need(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(output(capsys, f"{EXAMPLE} --json"))
    assert (facts["period"], facts["bound"], facts["status"]) == (27, 27, "optimal")
    assert facts["makespan"] >= 29  # the best that a synchronous optimizer, which makes the period the makespan, can do
    assert facts["method"] in ("greedy", "cpsat")
    assert facts["seconds"] >= 0
    # 18 micro-batches at four stages, each an F and either a B or an I and a W.
    assert 18 * 4 * 2 <= facts["num_ops"] <= 18 * 4 * 3
    assert len(facts["peak_in_flight"]) == 4
    assert all(1 <= peak <= 6 for peak in facts["peak_in_flight"])
    assert "failed" not in facts


def test_json_names_the_failures_that_were_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(output(capsys, f"{ANY_TWO} --json"))
    assert len(facts["distribution"]) == 4
    assert sum(facts["distribution"]) == len(facts["failed"]) == 2
    for stage, num in enumerate(facts["distribution"]):
        assert sum(worker.endswith(f"_{stage}") for worker in facts["failed"]) == num


def test_the_file_is_the_plan_that_was_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep" / "plan.json"
    facts = json.loads(output(capsys, f"{ANY_TWO} --out {path} --json"))
    plan = Plan.load(path)
    assert check(plan) == []
    assert (plan.period_us, plan.quality.bound_us, plan.num_ops) == (facts["period"], facts["bound"], facts["num_ops"])
    assert sorted(map(str, plan.problem.cluster.failed)) == facts["failed"]
    assert output(capsys, f"check {path}").startswith("legal: period ")
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]


def test_without_json_a_person_reads_what_was_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    text = output(capsys, f"{EXAMPLE} --out {path}")
    assert "3 pipelines x 4 stages, 6 micro-batches each; 1 dead: W1_2" in text
    assert "period    27 µs  (bound 27 µs: proven optimal)" in text
    assert f"written   {path}" in text
    assert "by stage" in text


def test_a_plan_that_is_not_proven_says_how_far_it_may_be_from_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan --pipelines 3 --stages 6 --microbatches 6 --fail W1_2,W0_4 --costs 5,7,3 --memory 3 --method greedy"
    assert "% above the best possible" in output(capsys, command)


@pytest.mark.parametrize(
    ("arguments", "period"),
    [("--techniques adaptive", 33), ("--techniques adaptive,decoupled", 29), ("--techniques adaptive --memory 4,3,2,1", 36)],
)
def test_techniques_and_memory_are_obeyed(capsys: pytest.CaptureFixture[str], arguments: str, period: int) -> None:
    assert json.loads(output(capsys, f"{EXAMPLE} {arguments} --json"))["period"] == period


@pytest.mark.parametrize("method", ["greedy", "cpsat", "milp"])
def test_the_method_is_obeyed(capsys: pytest.CaptureFixture[str], method: str) -> None:
    command = f"plan --pipelines 2 --stages 2 --microbatches 2 --fail W1_1 --costs 1,1,1 --time-limit 10 --method {method} --json"
    facts = json.loads(output(capsys, command))
    assert facts["method"] == method
    assert facts["period"] == 12


def test_a_profile_brings_its_memory_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "profile.json"
    output(capsys, f"estimate --model gpt3-6.7b --gpu a100-80 --stages 4 --out {profile}")
    arguments = "--pipelines 2 --stages 4 --microbatches 4 --method greedy"
    output(capsys, f"plan {arguments} --profile {profile} --out {tmp_path / 'plan.json'}")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.problem.memory.unit == "bytes"
    assert plan.problem.memory.limits == (80 * 10**9,) * 4


@pytest.mark.parametrize("command", [[], ["plan"], ["show"], ["check"], ["estimate"], ["profile"], ["demo"]])
def test_every_command_explains_itself_with_examples(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: {' '.join(['recycle', *command])}")
    examples = text.split("examples:")[1]
    assert f"recycle {command[0] if command else 'plan'}" in examples


def test_the_release_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == "recycle 0.1.0\n"
