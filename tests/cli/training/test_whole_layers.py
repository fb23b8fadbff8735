"""`recycle train --mean-time-between-failures`: whole layers move at a recovery, and the weights stay the same."""

import json
from pathlib import Path

import pytest

from recycle.cli.training.train_config import load_config
from tests.cli.commands import refusal, run

pytestmark = pytest.mark.timeout(240)
JOB = (
    "train --pipelines 2 --stages 2 --microbatches 4 --layers 6 --width 16 --heads 2 --context 16 --exact --tied --json --steps 5"
)


def test_layers_move_and_the_weights_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    still = run(f"{JOB} --out {tmp_path}/still").facts
    options = "--mean-time-between-failures 30m --costs 1000,1300,900 --no-follow-speeds"
    moved = run(f"{JOB} {options} --kill W1_1@2 --out {tmp_path}/moved").facts
    assert moved["weights_sha256"] == still["weights_sha256"]
    record = [json.loads(line) for line in (tmp_path / "moved" / "record.jsonl").read_text().splitlines()]
    # The head counts as layers when the GPT is cut: the run begins with four layers and two.
    assert [event["layers"] for event in record if event.get("event") == "recovery"] == [[5, 1]]
    assert load_config(tmp_path / "moved" / "config.toml").cluster.mean_time_s == 1800


def test_a_time_that_is_none_is_refused() -> None:
    assert "is not a duration" in refusal(f"{JOB} --mean-time-between-failures soon")
    assert "is above 0" in refusal(f"{JOB} --mean-time-between-failures 0s")
