"""`recycle train`: real processes, a small GPT, real text; the same weights whoever is dead from the start."""

import json
import shlex
from pathlib import Path

import pytest

from recycle.cli.main import main
from recycle.core.plan import Plan
from recycle.core.record import OpRan, read_record

SMALL = "train --pipelines 2 --stages 2 --microbatches 3 --steps 3 --layers 2 --width 32 --context 16 --samples 2"


def said(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(shlex.split(command)) == 0
    return capsys.readouterr().out


@pytest.mark.timeout(180)
def test_the_weights_are_the_same_bit_for_bit_whoever_is_dead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    options = f"{SMALL} --exact --dropout 0.1 --max-norm 1"
    whole = json.loads(said(f"{options} --json", capsys))
    text = said(f"{options} --dead W1_0 --out {run}", capsys)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["weights_sha256"] == whole["weights_sha256"]
    assert summary["losses"] == whole["losses"]
    assert whole["losses"][-1] < whole["losses"][0]
    assert (whole["workers"], summary["workers"], summary["recoveries"]) == (4, 3, [])
    assert "dead from the start: W1_0" in text
    plan = Plan.load(run / "plan.json")
    ran = [event for event in read_record(run / "record.jsonl") if isinstance(event, OpRan)]
    assert len(ran) == 3 * plan.num_ops
    # What a worker ran in an iteration is its row, op by op.
    for row in plan.rows:
        ops = [event.op for event in ran if event.worker == str(row.worker) and event.iteration == 1]
        assert ops == [str(slot.op) for slot in plan.slots(row)]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--steps 0", "--steps is 0, but it must be a whole number of at least 1"),
        ("--seed -1", "--seed is -1"),
        ("--rate nan", "--rate is nan"),
        ("--max-norm 0", "--max-norm is 0.0"),
        ("--dead W9_9", "W9_9 is not a worker of this cluster"),
        ("--dead W0_1,W1_1", "stage 1 has no live worker"),
        ("--layers 1", "1 layer"),
        ("--width 30", "30"),
        ("--context 9999999", "text"),
        ("--out /dev/null/run", "cannot write"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_sentence(
    options: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(f"{SMALL} {options}")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("recycle train: ")
    assert sentence in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
