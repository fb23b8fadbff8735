"""`recycle replay`: what it prints, what it writes, and what it refuses."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recycle.cli.main import main
from recycle.core.events.record import OpRan, Started
from recycle.core.events.record_file import read_record
from recycle.core.plans.plan import Plan
from tests.plans import costly_profile, make_1f1b_plan, make_rerouted_plan


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with a plan without failures, one with, and one that is not legal."""
    monkeypatch.chdir(tmp_path)
    make_1f1b_plan(profile=costly_profile(4)).save("plan.json")
    make_rerouted_plan(profile=costly_profile(2)).save("dead.json")
    replace(make_1f1b_plan(), period_us=20).save("illegal.json")
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["replay", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def facts(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    known = json.loads(printed(capsys, *arguments, "--json"))
    assert isinstance(known, dict)
    return known


def test_a_legal_plan_takes_exactly_its_period(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("plan.json", "dead.json"):
        planned = Plan.load(name).period_us
        known = facts(capsys, name)
        assert known["plan_period"] == known["period"] == planned
        assert known["periods"] == [planned] * 5
        assert known["eager_period"] <= planned


def test_the_facts_say_where_the_time_went(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = facts(capsys, "dead.json", "--iterations", "3")
    assert list(known["bubble_share"]["workers"]) == ["W0_0", "W0_1", "W1_0"]
    assert 0 < known["bubble_share"]["mean"] < 1
    assert known["peak_memory"] == {"unit": "bytes", "stages": [20, 10]}  # an I of this profile gives all back
    path = known["critical_path"]
    assert sum(path["by_kind"].values()) == path["length"]
    assert set(path["workers"]) <= {"W0_0", "W0_1", "W1_0"}
    assert path["ops"][0]["worker"] == path["workers"][0]
    for parts in known["time"].values():
        assert parts["busy"] + parts["bubble"] + parts["reduce"] + parts["optimizer"] == parts["span"]


def test_at_most_fifty_ops_of_a_long_path_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_1f1b_plan(1, 2, 60).save("long.json")
    path = facts(capsys, "long.json")["critical_path"]
    assert len(path["ops"]) == 50 < path["num_ops"]


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs, records = [], []
    for seed in ("1", "1", "2"):
        outputs.append(printed(capsys, "plan.json", "--jitter", "5%", "--seed", seed, "--record", "out.jsonl", "--json"))
        records.append(Path("out.jsonl").read_bytes())
    assert outputs[0] == outputs[1] != outputs[2]
    assert records[0] == records[1] != records[2]


def test_without_jitter_the_seed_says_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (facts(capsys, "plan.json", "--seed", seed) for seed in ("1", "2"))
    assert {**first, "conditions": None} == {**second, "conditions": None}


def test_noise_makes_a_plan_late(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = Plan.load("plan.json").period_us
    assert facts(capsys, "plan.json", "--jitter", "5%")["period"] > planned
    assert facts(capsys, "plan.json", "--jitter", "0.05")["period"] > planned
    assert facts(capsys, "plan.json", "--slow", "W0_1=1.3,W2_0=2")["period"] > 1.3 * planned


def test_an_eager_replay_is_its_own_comparison(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = facts(capsys, "dead.json", "--eager", "--contention")
    assert known["period"] == known["eager_period"]
    assert "wait" not in known["critical_path"]["by_kind"]
    out = printed(capsys, "dead.json", "--eager", "--contention")
    assert "replayed  5 iterations of 24 ops; messages share links, row order alone decides" in out
    assert not re.search(r"(?m)^eager ", out)


def test_the_summary_says_period_bubbles_memory_and_path_above_the_chart(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(capsys, "dead.json", "--slow", "W0_1=1.5")
    assert "replayed  5 iterations of 24 ops; W0_1 takes 1.5 times as long, no op before its planned start" in out
    assert re.search(r"(?m)^period    .* ms, \d+\.\d\d% over the .* ms planned; by iteration \d+, ", out)
    assert re.search(r"(?m)^eager     .* ms, ", out)
    assert re.search(
        r"(?m)^workers   busy \d+\.\d%, bubble \d+\.\d%, reduction and step \d+\.\d%; bubbles from .* \(W0_1\) to", out
    )
    assert re.search(r"(?m)^          stage 1   10 B  [▁-█ ]+$", out)
    assert re.search(r"(?m)^critical  path of iteration 3: .* ms; F \d", out)
    assert "iteration 3 of 5 as replayed" in out
    assert re.search(r"(?m)^W0_1 .*▕F0.*f0.*▏", out)
    assert re.search(r"(?m)^W1_1 .*dead", out)
    assert "exactly as planned" in printed(capsys, "dead.json")


def test_files_are_written_and_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"--record": "a.jsonl", "--svg": "a.svg", "--png": "a.png", "--perfetto": "a.json"}
    out = printed(capsys, "dead.json", *(text for option, name in names.items() for text in (option, f"deep/{name}")))
    assert all(f"wrote deep/{name}" in out for name in names.values())
    assert Path("deep/a.svg").read_text(encoding="utf-8").startswith("<svg ")
    assert Path("deep/a.png").read_bytes().startswith(b"\x89PNG\r\n")
    started, *ran = read_record("deep/a.jsonl")
    assert started == Started("replay", "dead.json")
    assert len(ran) == 5 * (24 + 3 + 2)
    trace = json.loads(Path("deep/a.json").read_text(encoding="utf-8"))["traceEvents"]
    slices = [event for event in trace if event["ph"] == "X" and event["name"] != "dead"]
    first = next(event for event in ran if isinstance(event, OpRan))
    assert len(slices) == len(ran)
    assert {"0F0"} == {event["name"] for event in slices if event["ts"] == first.start_us}


def test_a_single_iteration_can_be_replayed_and_drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "dead.json", "--iterations", "1", "--svg", "one.svg", "--perfetto", "one.json")
    assert "replayed  1 iteration of 24 ops" in out
    assert "iteration 0 of 1 as replayed" in out


def test_every_worker_is_drawn_if_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_1f1b_plan(12, 8, 2).save("wide.json")
    assert "56 of 96 workers are not shown" in printed(capsys, "wide.json")
    assert len(re.findall(r"(?m)^W\d+_\d +▕", printed(capsys, "wide.json", "--rows", "all"))) == 96


WRONG = {
    "unknown worker": ("plan.json --slow W9_0=2", r"W9_0 is not a worker of this plan: pipelines are 0 to 2, stages 0 to 3"),
    "dead worker": ("dead.json --slow W1_1=2", r"W1_1 is dead in this plan, so it cannot be slow"),
    "slow twice": ("plan.json --slow W0_0=2,W0_0=3", r"W0_0 is named as slow twice"),
    "malformed worker": ("plan.json --slow 0_0=2", r"'0_0' is not a worker: write W<pipeline>_<stage>"),
    "no factor": ("plan.json --slow W0_0", r"'W0_0' does not say how slow a worker is: write .* such as W0_1=1.3"),
    "factor that is a word": ("plan.json --slow W0_0=very", r"'W0_0=very' does not say how slow"),
    "factor 0": ("plan.json --slow W0_0=0", r"W0_0 cannot take 0 times as long: give a factor above 0, up to 1000"),
    "negative factor": ("plan.json --slow W0_0=-1", r"W0_0 cannot take -1 times as long"),
    "absurd factor": ("plan.json --slow W0_0=1e30", r"W0_0 cannot take 1e\+30 times as long"),
    "factor that is no number": ("plan.json --slow W0_0=nan", r"W0_0 cannot take nan times as long"),
    "negative jitter": ("plan.json --jitter=-5%", r"a jitter of -5% cannot be replayed: give from 0% to 100%"),
    "jitter above 100%": ("plan.json --jitter 101%", r"a jitter of 101% cannot be replayed"),
    "jitter of 5 times": ("plan.json --jitter 5", r"a jitter of 500% cannot be replayed"),
    "jitter that is a word": ("plan.json --jitter much", r"a jitter of 'much' cannot be replayed: write a share such as 5%"),
    "no iteration": ("plan.json --iterations 0", r"0 iterations cannot be replayed: give from 1 to 1000"),
    "too many iterations": ("plan.json --iterations 1001", r"1001 iterations cannot be replayed"),
    "half an iteration": ("plan.json --iterations 1.5", r"argument --iterations: invalid int value: '1.5'"),
    "negative seed": ("plan.json --seed -1", r"the seed is -1, but it must be a whole number of at least 0"),
    "missing plan": ("none.json", r"cannot read none.json: No such file"),
    "corrupt plan": ("corrupt.json", r"corrupt.json is not JSON"),
    "another file": ("other.json", r"other.json is not a recycle-plan file"),
    "illegal plan": (
        "illegal.json",
        r"illegal.json is not a legal plan, .* a period of 20 µs, but its slots take 27 µs.*; recycle check illegal.json lists",
    ),
    "record below a file": ("plan.json --record plan.json/a", r"cannot write plan.json/a"),
    "picture into a folder": ("plan.json --png .", r"cannot write \.: it is a folder"),
    "trace below a file": ("plan.json --perfetto plan.json/a", r"cannot write plan.json/a"),
    "drawing below a file": ("plan.json --svg plan.json/a", r"cannot write plan.json/a"),
}


@pytest.mark.parametrize(("arguments", "sentence"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_used_is_refused_in_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, sentence: str
) -> None:
    Path("corrupt.json").write_text(Path("plan.json").read_text(encoding="utf-8")[:-40], encoding="utf-8")
    Path("other.json").write_text("{}", encoding="utf-8")
    before = sorted(folder.rglob("*"))
    try:
        code = main(["replay", *arguments.split()])
    except SystemExit as stop:  # argparse leaves this way
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert re.search(sentence, captured.err), captured.err
    assert sorted(folder.rglob("*")) == before
