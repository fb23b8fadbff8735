"""`recycle simulate --profile`: all systems run by a measured profile, and wrong combinations get one sentence."""

import json
from pathlib import Path

import pytest

from recycle.core.events.record import Started
from recycle.core.events.record_file import write_record
from recycle.core.profile import Profile
from recycle.sim.systems.registry import SYSTEMS
from tests.cli.commands import output_of, refusal
from tests.recovery_records import LEFT
from tests.sim.quick_plans import plan_quickly

SHAPE = "--pipelines 2 --stages 2 --microbatches 4"
TAKEN = {"device": "cuda", "machine": "NVIDIA H200", "torch": "2.11", "pipelines": 3, "samples": 2, "model": "GPT of width 64"}


@pytest.fixture(autouse=True)
def _plan_here(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_quickly(monkeypatch)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A profile as `recycle profile` writes it: it does not know the memory of a device."""
    made = Profile.uniform(2, 30_000, 30_000, 30_000).to_json()
    fast = {"latency_us": 10, "bytes_per_us": 1e5}
    made |= {"taken": TAKEN, "layers": [4, 4], "stage_link": fast, "peer_link": fast}
    for stage in made["stages"]:
        stage |= {"activation_bytes": 1 << 20, "static_bytes": 16 << 20, "gradient_bytes": 4 << 20, "output_bytes": 1 << 16}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(made))
    return path


def test_every_system_runs_by_a_measured_profile(profile: Path) -> None:
    failures = "--mtbf 20h --rejoin 1h --hours 24"
    command = f"simulate --profile {profile} --memory 1GiB {SHAPE} {failures} --no-cache --shared-layers 0 --json"
    found = json.loads(output_of(command))
    assert (found["model"], found["gpu"], found["nodes"], found["samples_per_step"]) == ("GPT of width 64", "NVIDIA H200", 4, 16)
    # 1F1B of 2 stages, F + B = 90 ms: (4 + 1) x 90 ms and a reduction and a step for 16 samples.
    assert found["fault_free"] == pytest.approx(16 / 0.45, rel=0.01)
    assert set(found["systems"]) == set(SYSTEMS)
    assert all(run["samples"] > 0 for run in found["systems"].values())


def test_the_cost_counts_samples_unless_their_tokens_are_given(profile: Path) -> None:
    command = f"simulate --profile {profile} --memory 1GiB {SHAPE} --systems ideal --no-cache --gpu-price 2 --json"
    samples = json.loads(output_of(command))["systems"]["ideal"]["paid"]
    tokens = json.loads(output_of(f"{command} --sequence 1024"))["systems"]["ideal"]["paid"]
    assert samples["cost_per_million_samples"] == pytest.approx(1024 * tokens["cost_per_million_tokens"], rel=1e-3)


def test_another_number_of_pipelines_than_was_measured_is_remarked(profile: Path) -> None:
    text = output_of(f"simulate --profile {profile} --memory 1GiB {SHAPE} --systems ideal --no-cache")
    assert "note: this profile was measured with 3" in text.splitlines()[1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("", "does not say how much memory a device has: give it, such as --memory 80GiB"),
        ("--memory 1GiB --model gpt3-6.7b", "--model and --profile both say what ops cost: leave --model out"),
        ("--memory 1GiB --gpu h100", "--gpu and --profile both say what ops cost"),
        ("--memory 1GiB --tensor-parallel 2", "--tensor-parallel and --profile both say what ops cost"),
        ("--memory 1GiB --layers 8", "the profile lists its 8 layers itself: leave --layers out"),
        ("--memory 1MiB", "does not fit on NVIDIA H200"),
        ("--memory 1GiB --sequence 0", "a sample has from 1 to"),
        ("--memory much", "is not a size"),
    ],
)
def test_what_a_profile_says_itself_or_cannot_say_is_explained(profile: Path, options: str, sentence: str) -> None:
    assert sentence in refusal(f"simulate --profile {profile} {SHAPE} {options}")


def test_a_model_without_a_gpu_or_with_options_of_a_profile_is_explained() -> None:
    assert "--gpu is missing: give --model and --gpu, or a measured --profile" in refusal(f"simulate --model gpt3-6.7b {SHAPE}")
    assert "--memory goes with --profile" in refusal(f"simulate --model gpt3-6.7b --gpu h100 {SHAPE} --memory 80GiB")


def test_a_profile_without_layers_needs_their_number(profile: Path) -> None:
    made = json.loads(profile.read_text())
    del made["layers"]
    profile.write_text(json.dumps(made))
    command = f"simulate --profile {profile} --memory 1GiB {SHAPE} --systems varuna --no-cache --json"
    assert "give --layers N" in refusal(command)
    assert json.loads(output_of(f"{command} --layers 8"))["systems"]["varuna"]["samples"] > 0


def test_pauses_come_from_the_folder_of_a_run_at_the_asked_scale(profile: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_record(run / "record.jsonl", [Started("train", "a run"), LEFT])
    command = f"simulate --profile {profile} --memory 1GiB {SHAPE} --systems recycle --no-cache --interval 1h --shared-layers 0"
    found = json.loads(output_of(f"{command} --constants {run} --json"))
    assert found["measured_constants"]["regroup_us"] == 92_000
    pauses = found["systems"]["recycle"]["pauses_us"]
    assert pauses["detect"] / pauses["abort"] == pytest.approx(3 / 41)
    assert "pauses as measured with 12 workers (recoveries: 1): detect 3 ms" in output_of(f"{command} --constants {run}")


def test_a_run_without_a_failure_is_refused(profile: Path, tmp_path: Path) -> None:
    write_record(tmp_path / "record.jsonl", [Started("train", "a run")])
    command = f"simulate --profile {profile} --memory 1GiB {SHAPE} --constants {tmp_path}"
    assert "has no recovery from a failure, so that it measured no pauses" in refusal(command)
