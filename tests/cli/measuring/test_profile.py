"""`recycle profile`: a small cluster is measured for real, and its file feeds `recycle plan`; refusals in a sentence."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recycle.cli.measuring.profile import showing_rounds, without_clipping
from recycle.cli.profile_text import describe_profile, mismatch_note, stability_text, stage_table, unevenness_text
from recycle.cli.training.train_config import TrainConfig, parse_config
from recycle.core.cluster import Shape
from recycle.core.layer_shares import LayerShare
from recycle.core.plans.plan import Plan
from recycle.core.profile import Link, Profile, Spread, StageProfile, Taken
from recycle.profiling.rehearsal import Patience, Rehearsed
from recycle.report.record.contention_text import contention_text, oversubscription_note
from tests.cli.commands import refusal, run

pytestmark = pytest.mark.timeout(240)
START = (
    "measuring 4 workers in at most 1 round, until medians move by at most 2%: "
    "this can take minutes; the time left is shown after the first round"
)
SMALL = "profile --pipelines 2 --stages 2 --microbatches 2 --layers 2 --width 32 --heads 2 --context 16"


# A real measurement.


def test_a_measured_profile_is_printed_kept_and_planned_with(tmp_path: Path) -> None:
    # Keys of a file that cannot matter here are no hindrance.
    config = tmp_path / "run.toml"
    config.write_text("[training]\nsteps = 3\n[checkpoint]\nevery = 2\n[data]\nsamples = 5\n[cluster]\ndead = 'W0_1'\n")
    path = tmp_path / "deep" / "profile.json"
    ended = run(f"{SMALL} {config} --microbatch 3 --rounds 1 --out {path} --json")
    code, out, err = ended.code, ended.out, ended.err
    assert code == 0, err
    # The note on cores depends on the machine.
    assert [line for line in err.splitlines() if " workers share " not in line] == [
        START,
        "starting the processes of 4 workers",
        "round 1 of at most 1",
        "note: not known after one round: take the numbers with care, or measure again with more --rounds",
    ]
    profile = Profile.load(path)
    assert json.loads(out) == json.loads(path.read_text())
    assert profile.taken is not None
    assert (profile.taken.pipelines, profile.taken.samples, profile.taken.device) == (2, 3, "cpu")
    assert profile.taken.model == "GPT of width 32, 2 layers, 2 heads, context 16, float32"
    assert profile.stages[0].output_bytes == 3 * 16 * 32 * 4  # samples, context, width, float32

    plans = f"plan --stages 2 --microbatches 2 --profile {path} --method greedy --out {tmp_path / 'plan.json'} --json"
    ended = run(f"{plans} --pipelines 2")
    code, out, err = ended.code, ended.out, ended.err
    assert (code, err) == (0, "")
    assert Plan.load(tmp_path / "plan.json").problem.profile == profile
    ended = run(f"{plans} --pipelines 3")
    code, out, err = ended.code, ended.out, ended.err
    assert code == 0
    assert json.loads(out)["period"] > 0
    machine = re.escape(profile.taken.machine)
    note = rf"note: .* with 2 pipelines of 3 samples a micro-batch on {machine}; reductions and contention may differ for 3\n"
    assert re.fullmatch(note, err)


def test_every_round_is_shown_with_the_change_of_medians_and_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with showing_rounds(4, Patience(0.02, 2, 3)) as advance:
        advance(1, 1.0)
        advance(2, 0.031)
        advance(3, 0.012)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "starting the processes of 4 workers"
    assert re.fullmatch(r"round 1 of at most 3, at most .+ left", lines[1])
    assert re.fullmatch(r"round 2 of at most 3: medians moved by 3\.1%, at most .+ left", lines[2])
    assert lines[3] == "round 3 of at most 3: medians moved by 1.2%"


def test_steps_are_measured_without_clipping_because_clipped_ones_wait_for_others() -> None:
    assert without_clipping(parse_config("[training]\nmax_norm = 0.5\nsteps = 7\n")) == parse_config("[training]\nsteps = 7\n")


# Refusals.


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        ("--stages 0", 2, "cluster.stages is 0, but it must be a whole number from 1"),
        ("--stages 3", 10, "3 stages"),
        ("--microbatch 0", 2, "data.samples is 0"),
        ("--rounds 0", 2, "--rounds is 0, but at least 1 round must be measured"),
        ("--device tpu", 2, 'training.device is "tpu", but it must be cpu or cuda'),
        ("--heads 5", 2, "width"),
        ("missing.toml", 2, "cannot read missing.toml"),
        ("--samples 100000000", 11, "one step needs 400000000 samples"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(tmp_path: Path, options: str, code: int, sentence: str) -> None:
    path = tmp_path / "profile.json"
    assert sentence in refusal(f"{SMALL} {options} --out {path}", code)
    assert not path.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_refused(tmp_path: Path) -> None:
    assert "torch finds no GPU here" in refusal(f"{SMALL} --device cuda --out {tmp_path / 'profile.json'}")


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    assert "it is a folder; name a file" in refusal(f"{SMALL} --out {tmp_path}")


def test_the_help_ends_with_the_plan_that_is_made_next() -> None:
    ended = run("profile --help")
    code, out, _ = ended.code, ended.out, ended.err
    assert code == 0
    assert out.startswith("usage: recycle profile [CONFIG] [options]")
    assert "recycle plan --profile profile.json" in out.split("examples:")[1].splitlines()[-1]


# The printed text of a given profile.

TAKEN = Taken("cuda", "NVIDIA H200", "2.11", 3, 2, "GPT of width 64, 8 layers, 4 heads, context 64, float32")
STAGE = StageProfile(
    12_340,
    15_000,
    9_000,
    22_000,
    optimizer_us=700,
    activation_bytes=3 * 2**20,
    weight_held_bytes=2**20,
    static_bytes=2**30,
    gradient_bytes=4_000,
    output_bytes=1_000,
    spread=Spread(120, 130, 140, 150),
)
MEASURED = Profile(
    (STAGE, STAGE),
    stage_link=Link(20, 100.0),
    peer_link=Link(10, 50.0),
    taken=TAKEN,
    factors=(0.95, 1.0, 1.12),
    contention=(0.95, 0.95, 0.96, 1.0, 1.0, 1.045),
    layers=((LayerShare(),) * 3, (LayerShare(), LayerShare(2, 2, 2))),
)
PATIENCE = Patience(0.02, 3, 8)


def test_a_stage_has_a_row_with_all_that_it_costs() -> None:
    head, first, last = stage_table(MEASURED, 3)
    cells = [cell.strip() for cell in re.split(r"\s{2,}", first.strip())]
    assert dict(zip(re.split(r"\s{2,}", head.strip()), cells, strict=True)) == {
        "stage": "0",
        "F": "12.34 ms ± 120 µs",
        "I": "15.00 ms ± 130 µs",
        "W": "9000 µs ± 140 µs",
        "B": "22.00 ms ± 150 µs",
        "after F": "3.0 MiB",
        "after I": "1.0 MiB",
        "static": "1.0 GiB",
        "gradients": "3.9 KiB",
        "send": "30 µs",  # 20 µs and 1,000 bytes at 100 bytes/µs
        "reduce": "147 µs",  # four steps of 10 µs and a third of 4,000 bytes at 50 bytes/µs
        "step": "700 µs",
    }
    assert re.split(r"\s{2,}", last.strip())[9] == "-"  # the last stage sends nothing on
    assert len({len(head), len(first), len(last)}) == 1


def test_links_contention_and_the_machine_are_described_below_the_table() -> None:
    text = describe_profile(Rehearsed(MEASURED, 4, 0.012, True), PATIENCE, Shape(3, 2, 6), Path("p.json"))
    assert text.splitlines()[4:] == [
        "links       to other stages 20 µs and 95.4 MiB/s; to peers 10 µs and 47.7 MiB/s",
        "contention  alone, ops take 0.950 of their cost, 0.950 with 1 other, 1.000 with 3 others, 1.045 with all 5",
        "workers     the slowest took 1.12 times as long as the median, the fastest 0.95; durations of one worker vary by 1.4%",
        # A third of a stage is usual, and the last layer takes two thirds of one.
        "layers      3,2 by stage; the slowest is layer 4, with 2.00 times the median",
        f"machine     NVIDIA H200 (cuda), torch 2.11: 3 pipelines of 2 samples a micro-batch; {TAKEN.model}",
        "stability   medians moved by 1.2% in the last of 4 rounds",
        "written     p.json  (recycle plan --profile p.json --pipelines 3 --stages 2 --microbatches 6)",
    ]


def test_missing_measurements_have_no_number() -> None:
    alone = replace(MEASURED, stages=(STAGE,), factors=(), contention=(), layers=())
    text = describe_profile(Rehearsed(alone, 3, 0.0, True), PATIENCE, Shape(1, 1, 6), Path("p.json"))
    assert "links       to other stages none; to peers none" in text
    assert "contention  none: no other worker computed" in text
    assert unevenness_text(alone) == "durations of one worker vary by 1.4%"
    assert contention_text(replace(alone, contention=(1.0, 1.0, 1.0))) == "none found: ops are as fast with 2 others as alone"


def test_medians_that_still_move_get_a_warning() -> None:
    restless = stability_text(Rehearsed(MEASURED, 8, 0.051, False), PATIENCE)
    assert restless == (
        "this machine is not quiet: medians still moved by 5.1% in the last of 8 rounds, more than 2.0%; "
        "take the numbers with care"
    )


# The note when a profile is used for something else.

OTHER = "GPT of width 64, 8 layers, 4 heads, context 64, dropout 0.1, tied embeddings, bfloat16"
FITTING = parse_config('[training]\ndevice = "cuda"\n')


def note_for(taken: Taken | None, config: TrainConfig) -> str | None:
    """The note on a profile for a run of this configuration with 3 pipelines."""
    return mismatch_note(taken, 3, config.training.device, config.data.samples, config.model_text)


def test_a_profile_that_fits_or_was_not_measured_gets_no_note() -> None:
    assert mismatch_note(TAKEN, 3) is None
    assert note_for(TAKEN, FITTING) is None
    assert note_for(None, FITTING) is None


def test_a_profile_of_another_number_of_pipelines_gets_a_note() -> None:
    assert mismatch_note(TAKEN, 4) == (
        "note: this profile was measured with 3 pipelines of 2 samples a micro-batch on NVIDIA H200; "
        "reductions and contention may differ for 4"
    )


@pytest.mark.parametrize(
    ("text", "difference"),
    [
        ("", "this run computes on cpu"),
        ('[training]\ndevice = "cuda"\n[data]\nsamples = 1', "this run has 1 sample a micro-batch"),
        (
            '[training]\ndevice = "cuda"\nprecision = "bfloat16"\n[model]\ntied = true\ndropout = 0.1',
            f"it was of a {TAKEN.model}, and this run is of a {OTHER}",
        ),
    ],
)
def test_training_by_a_profile_of_another_device_micro_batch_or_model_gets_a_note(text: str, difference: str) -> None:
    note = note_for(TAKEN, parse_config(text))
    assert note == f"note: this profile was measured with 3 pipelines of 2 samples a micro-batch on NVIDIA H200; {difference}"


def test_train_prints_the_note_too(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(MEASURED.to_json()))
    command = "train --pipelines 2 --stages 2 --microbatches 2 --steps 1 --layers 2 --width 32 --heads 2 --context 16"
    ended = run(f"{command} --profile {path} --json")
    code, _, err = ended.code, ended.out, ended.err
    assert code == 0, err
    notes = [line for line in err.splitlines() if line.startswith("note:")]
    assert len(notes) == 1
    assert "on NVIDIA H200; reductions and contention may differ for 2; this run computes on cpu; it was of a GPT" in notes[0]


def test_more_workers_than_cores_get_a_note():
    assert oversubscription_note(12, 12) is None
    assert (
        oversubscription_note(12, 1)
        == "note: 12 workers share 1 core: much of the measured time is time in which they wait for each other"
    )
