"""`recycle demo`: its arguments, what it refuses, and all of it with real processes; `--plans` draws the paper's example."""

import json
import os
import re
import shlex
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recycle.cli.demo import twin_runs
from recycle.cli.demo.demo import read_setting
from recycle.cli.demo.twin_runs import FULL, QUICK, DemoSettings
from recycle.cli.main import make_parser
from recycle.core.cluster import Shape, Worker
from tests.cli.commands import Ended, run
from tests.processes import wait_for
from tests.warm_processes import WarmProcess

# Four workers instead of twelve: the same story, in as little time as four processes take to start twice.
SMALL = DemoSettings(
    Shape(2, 2, 2), killed=Worker(1, 1), hung=Worker(0, 0), num_layers=2, width=32, context=16, num_steps=60, lease_s=1.0
)


def setting(*words: str) -> DemoSettings:
    return read_setting(make_parser().parse_args(["demo", *words]))


def test_without_a_flag_it_is_the_paper_s_twelve_workers() -> None:
    assert setting() == FULL
    assert FULL.shape == Shape(3, 4, 6)
    assert FULL.script.to_json() == ["kill W1_2@6", "hang W0_1@11", "rejoin W1_2@16"]


def test_quick_is_a_smaller_model_for_fewer_steps_with_as_many_workers() -> None:
    assert setting("--quick") == QUICK
    assert QUICK.shape == FULL.shape
    assert (QUICK.num_layers, QUICK.width, QUICK.num_steps) < (FULL.num_layers, FULL.width, FULL.num_steps)


def test_steps_can_be_given_for_either() -> None:
    assert setting("--steps", "90") == replace(FULL, num_steps=90)
    assert setting("--quick", "--steps", "12") == replace(QUICK, num_steps=12)


@pytest.mark.parametrize("num_steps", [12, 13, 17, 23, 24, 36, 40, 61, 1000])
def test_whatever_the_number_of_steps_one_dies_then_another_hangs_then_the_first_comes_back(num_steps: int) -> None:
    known = replace(FULL, num_steps=num_steps)
    kill, hang, rejoin = known.injections
    assert 1 < kill.step < hang.step < rejoin.step <= num_steps // 2
    assert [line.split("@")[0] for line in known.script.to_json()] == ["kill W1_2", "hang W0_1", "rejoin W1_2"]


@pytest.mark.parametrize("num_steps", ["11", "0", "-3"])
def test_too_few_steps_are_refused(num_steps: str) -> None:
    ended = run(f"demo --steps {num_steps}")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        f"recycle demo: {num_steps} steps are too few for somebody to die, to hang and to come back: give at least 12\n"
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [(["--json"], "--json"), (["--quick", "--steps", "40"], "--steps and --quick"), (["--steps", "0"], "--steps")],
)
def test_what_is_for_training_does_not_go_with_plans(words: list[str], named: str) -> None:
    ended = run(shlex.join(["demo", "--plans", *words]))
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == f"recycle demo: --plans draws and trains nothing: leave {named} out\n"


def test_without_torch_it_says_how_to_install_it_and_what_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    ended = run("demo --quick")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("recycle demo: the demo trains a model, which needs torch (")
    assert "pip install -e '.[train]' in a clone of ReCycle" in ended.err
    assert "recycle demo --plans" in ended.err
    assert ended.err.count("\n") == 1


def test_the_plans_have_the_periods_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    ended = run("demo --plans")
    assert ended.code == 0
    table = ended.out.split("slots for one iteration")[1]
    rows = [
        (line[:38].strip(), int(line[38:42])) for line in table.splitlines() if line.strip() and line[38:42].strip().isdigit()
    ]
    assert rows == [
        ("fault-free 1F1B", 27),
        ("Adaptive Pipelining, memory 4,3,2,1", 36),
        ("Adaptive Pipelining", 33),
        ("+ Decoupled BackProp", 29),
        ("+ Staggered Optimizer", 27),
    ]


# The whole of it.


@pytest.fixture(scope="module")
def shown() -> Ended:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twin_runs, "QUICK", SMALL)
        return run("demo --quick --json")


@pytest.fixture(scope="module")
def facts(shown: Ended) -> dict[str, Any]:
    assert shown.out.count("\n") == 1
    made: dict[str, Any] = json.loads(shown.out, parse_constant=pytest.fail)
    return made


@pytest.mark.timeout(120)
def test_with_a_kill_a_hang_and_a_rejoin_losses_and_weights_are_those_of_the_twin(shown: Ended, facts: dict[str, Any]) -> None:
    assert shown.code == 0
    assert facts["equal"] is True
    assert facts["weights_sha256"] == facts["twin_weights_sha256"]
    assert facts["losses"] == facts["twin_losses"]
    assert len(facts["losses"]) == SMALL.num_steps
    assert facts["losses"][-1] < facts["losses"][0]


@pytest.mark.timeout(120)
def test_the_failures_of_the_script_come_to_pass_in_their_steps(facts: dict[str, Any]) -> None:
    killed, hung = facts["recoveries"][:2]
    assert (killed["worker"], killed["joins"], killed["step"]) == ("W1_1", False, SMALL.injections[0].step)
    assert (hung["worker"], hung["joins"], hung["step"]) == ("W0_0", False, SMALL.injections[1].step)
    assert "silent" in hung["cause"]
    assert hung["detect_us"] > killed["detect_us"]
    assert [phase["dead"] for phase in facts["phases"][:3]] == [[], ["W1_1"], ["W0_0", "W1_1"]]
    assert sum(phase["steps"] for phase in facts["phases"]) == SMALL.num_steps


@pytest.mark.timeout(120)
def test_a_worker_that_rejoins_gets_its_place_or_a_sentence_says_that_there_was_no_time(
    shown: Ended, facts: dict[str, Any]
) -> None:
    joined = [one for one in facts["recoveries"] if one["joins"]]
    if not joined:  # the run was over before the process had loaded
        assert "W1_1 was still loading when the run ended" in " ".join(shown.err.split())
        return
    assert [one["worker"] for one in joined] == ["W1_1"]
    assert joined[0]["step"] >= SMALL.injections[2].step
    assert re.search(r"W1_1 \(host \S+, pid \d+\) joined: 3 workers are live", " ".join(shown.err.split()))
    last = facts["phases"][-1]
    assert (last["dead"], last["back"], last["workers"]) == (["W0_0"], ["W1_1"], 3)


@pytest.mark.timeout(120)
def test_without_a_terminal_it_says_all_in_plain_lines(shown: Ended, facts: dict[str, Any]) -> None:
    text = " ".join(shown.err.split())
    assert "\x1b" not in shown.err
    assert text.startswith("A small GPT of 2 layers")
    process = r"\(host \S+, pid \d+\)"
    order = [
        rf"W1_1 {process} left: 3 workers are live",
        rf"W0_0 {process} is suspected",
        "Now the twin",
        "EQUAL: all 60 losses and all weights",
    ]
    assert re.search(".*".join(order), text)
    assert shown.err.count(facts["weights_sha256"]) == 2
    assert f"step 60 of 60 loss {facts['losses'][-1]:.4f}" in text
    assert "before, nobody dead" in text


# Ctrl-C.

_PROGRAM = f"""
import sys
from recycle.cli.demo import twin_runs
from recycle.cli.main import main
from recycle.core.cluster import Shape, Worker

if __name__ == "__main__":
    twin_runs.QUICK = twin_runs.{SMALL!r}
    sys.exit(main(["demo", "--quick"]))
"""


@pytest.mark.timeout(120)
def test_ctrl_c_ends_it_and_all_its_workers_with_130(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    process = WarmProcess([program], is_script=True)
    wait_for(lambda: "step 6 of 60" in process.printed()[1], 60)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to everybody
    out, err = process.communicate(60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "recycle demo: interrupted" in err
    assert "EQUAL" not in out
    while _is_anybody_left(process.pid):
        time.sleep(0.05)


def _is_anybody_left(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
