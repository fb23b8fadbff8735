"""`recycle plan` and `recycle show` with shared layers and speeds."""

from pathlib import Path

import pytest

from recycle.cli.planning import plan as plan_command
from recycle.core.plans.plan import Plan
from tests.cli.commands import output_of, refusal, run

SMALL = "--pipelines 3 --stages 4 --microbatches 6 --costs 40,52,36 --method greedy --effort 20000"
CUT = f"{SMALL} --layers 16 --shared-layers 2 --fail W1_2"


def test_json_says_what_is_kept_and_what_is_alive() -> None:
    facts = run(f"plan {CUT} --json").facts
    assert facts["kept"] == round(facts["fault_free_period"] / facts["period"], 4)
    assert 0.8 < facts["kept"] <= 1
    assert facts["live_share"] == round(11 / 12, 4)


def test_a_large_plan_is_compared_with_one_that_is_made_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = run(f"plan {CUT} --json").facts
    monkeypatch.setattr(plan_command, "_LARGE_OPS", 1)
    beside = run(f"plan {CUT} --json").facts
    assert {**beside, "seconds": 0} == {**alone, "seconds": 0}


def test_a_slow_worker_lowers_the_live_share() -> None:
    facts = run(f"plan {SMALL} --speed W1_2=0.6 --json").facts
    assert facts["live_share"] == round(11.6 / 12, 4)


def test_without_the_options_the_object_is_as_before() -> None:
    facts = run(f"plan {SMALL} --fail W1_2 --json").facts
    assert not {"kept", "live_share", "fault_free_period"} & set(facts)


def test_the_summary_and_the_chart_show_the_cuts(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    summary = output_of(f"plan {CUT} --out {path}")
    assert "of the fault-free throughput" in summary
    assert "91.7% of the workers' speed is alive" in summary
    plan = Plan.load(path)
    assert plan.cuts
    shown = output_of(f"show {path} --width 120 --svg {tmp_path}/plan.svg --png {tmp_path}/plan.png")
    assert "layers of each micro-batch at each stage" in shown
    table = [line for line in shown.splitlines() if line.startswith("stage ")]
    assert len(table) == 4
    assert table[2].startswith("stage 2 (4)")
    assert "3" in table[2]  # the stage that lost a worker has fewer layers
    assert 'class="fewer"' in (tmp_path / "plan.svg").read_text()
    assert "legal" in output_of(f"check {path}")
    assert "exactly as planned" in output_of(f"replay {path}")


def test_a_plan_with_cuts_has_no_csv_form(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    output_of(f"plan {SMALL} --layers 16 --shared-layers 2 --speed W0_1=0.5,W1_1=0.5,W2_1=0.5 --out {path}")
    assert Plan.load(path).cuts
    assert "--shared-layers 0" in refusal(f"show {path} --csv x.csv")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--shared-layers 2", "give --layers"),
        ("--layers 15 --shared-layers 1", "15 layers cannot be divided equally over 4 stages"),
        ("--layers 8 --shared-layers 3", "stage 0 has only 2"),
        ("--layers 8 --shared-layers -1", "whole number from 0"),
        ("--speed W0_3", "write <worker>=<speed>"),
        ("--speed W0_3=fast", "write <worker>=<speed>"),
        ("--speed W0_3=0", "the speed of W0_3 is 0.0"),
        ("--speed W9_3=0.5", "W9_3 has a speed, but is not a worker"),
    ],
)
def test_wrong_input_gets_one_sentence(options: str, sentence: str) -> None:
    assert sentence in refusal(f"plan {SMALL} {options}")


def test_auto_chooses_a_number_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    options = f"{SMALL} --layers 16 --shared-layers auto --fail W1_2"
    facts = run(f"plan {options} --json --out {path}").facts
    assert facts["shared_layers"] == Plan.load(path).problem.shared_layers > 0
    assert facts["shared_layers_because"].startswith(f"neighbouring stages share {facts['shared_layers']} layer")
    summary = output_of(f"plan {options}").splitlines()
    assert [line for line in summary if line.startswith("layers    neighbouring stages share ")]


def test_an_estimate_has_layers_and_memory(tmp_path: Path) -> None:
    """The bytes of shared layers are those of the state that a worker holds more than it would without any."""
    profile = tmp_path / "profile.json"
    output_of(f"estimate --model gpt3-medium --gpu a100-80 --stages 4 --out {profile}")
    command = f"plan --pipelines 2 --stages 4 --microbatches 8 --profile {profile} --effort 20000"
    facts, alone = (run(f"{command} --shared-layers {shared} --json").facts for shared in (1, 0))
    layer_bytes = 18 * (12 * 1024**2 + 13 * 1024)
    assert facts["memory"]["shared"][1:3] == pytest.approx([2 * layer_bytes] * 2, rel=1e-6)
    assert facts["memory"]["shared"][0] == facts["memory"]["shared"][3] == pytest.approx(layer_bytes, rel=1e-6)
    assert all(size > 0 for size in facts["memory"]["activations"])
    assert "memory" not in alone
    summary = output_of(f"{command} --shared-layers 1")
    assert "more for shared layers" in summary


def test_auto_needs_layers() -> None:
    assert "nothing says how many layers a stage has" in refusal(f"plan {SMALL} --shared-layers auto")
    assert "'some' is no number of layers: give a whole number, or auto" in refusal(f"plan {SMALL} --shared-layers some")


def test_the_answer_of_a_running_job_depends_on_the_time_between_failures() -> None:
    long = run(f"plan {SMALL} --layers 24 --fail W1_2 --mean-time-between-failures 30m --json").facts
    assert long["layers"] == [6, 7, 4, 7]
    assert long["moves"] == []
    assert "whole layers move" in long["because"]
    assert "within 30 min, until the next failure" in long["because"]
    assert 0.85 < long["kept"] < 0.92
    text = output_of(f"plan {SMALL} --layers 24 --fail W0_0,W0_1,W0_2,W0_3 --mean-time-between-failures 30m")
    assert "answer    planned on the spot, and nobody moves" in text
    told = refusal(f"plan {SMALL} --failures 2 --mean-time-between-failures 30m")
    assert "is for dead workers by name" in told
