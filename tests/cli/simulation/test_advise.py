"""`recycle advise`: what it prints and writes, that a second call answers at once, and what a user can get wrong."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from recycle.cli.simulation.advise_text import closeness
from recycle.core.cluster import Shape
from recycle.core.events.record import Started
from recycle.core.events.record_file import write_record
from recycle.core.profile import Profile
from recycle.sim.advise import evaluations
from recycle.sim.advise.choices import SystemChoice
from recycle.sim.advise.evaluations import SimulatedRuns
from recycle.sim.advise.search import FoundChoice
from recycle.sim.campaign.run_constants import run_constants
from tests.cli.commands import output_of, refusal
from tests.cli.simulation.test_job_options import TAKEN
from tests.recovery_records import LEFT
from tests.sim.quick_plans import plan_quickly

JOB = (
    "advise --model layers=4,hidden=1024,heads=8,sequence=512,vocabulary=1000 --gpu a100-80 --gpus 4 --gpus-per-server 1 "
    "--batch 8 --mtbf 3d --repair 6h --days 5 --seeds 2 --systems recycle,replica-drop,checkpoint-restart,oobleck"
)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_quickly(monkeypatch)
    monkeypatch.setattr(evaluations.os, "cpu_count", lambda: 1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def answer(arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output_of(f"{JOB} {arguments} --json"))
    return found


def test_the_best_of_every_system_is_named_with_and_without_spares(cache: Path) -> None:
    facts = answer(f"--cache {cache}")
    groups = {(group["system"], group["has_spares"]): group["best"] for group in facts["systems"]}
    assert set(groups) == {
        (name, spare) for name in ("recycle", "replica-drop", "checkpoint-restart", "oobleck") for spare in (False, True)
    }
    means = [best["samples_per_s"] for best in groups.values() if best]
    assert facts["first"]["samples_per_s"] == max(means)
    low, high = facts["first"]["interval_90"]
    assert low <= facts["first"]["samples_per_s"] <= high
    assert 0 < facts["first"]["goodput"] <= 1
    shares = [bound / facts["first"]["fault_free_samples_per_s"] for bound in (low, high)]
    assert facts["first"]["goodput_interval_90"] == pytest.approx(shares, abs=2e-6)
    used = facts["first"]["shape"]
    assert used["num_pipelines"] * used["num_stages"] * facts["first"]["tensor_parallel"] + facts["first"]["spare_gpus"] == 4
    assert [one["samples_per_s"] <= facts["first"]["samples_per_s"] for one in facts["alternatives"]] == [True] * 3
    assert {one["axis"] for one in facts["thresholds"]} == {"failures", "repairs", "pauses"}


def test_a_second_call_answers_from_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = answer(f"--cache {cache}")
    monkeypatch.setitem(evaluations.FUNCTIONS, "runs", lambda *_: pytest.fail("this was answered before"))
    assert answer(f"--cache {cache}") == before


def test_a_page_its_numbers_and_a_picture_are_written(cache: Path, folder: Path) -> None:
    printed = output_of(f"{JOB} --cache {cache} --gpu-price 2 --out advice")
    page = (folder / "advice" / "advice.md").read_text()
    facts = json.loads((folder / "advice" / "advice.json").read_text())
    assert (folder / "advice" / "advice.png").read_bytes().startswith(PNG)
    for heading in (
        "First choice and closest alternatives",
        "Best of every system",
        "What would change the verdict",
        "Assumptions",
    ):
        assert f"## {heading}" in page
        assert f"## {heading}" in printed
    # Four GPUs at 2 an hour cost 8 / 3600 a second.
    cost = 8 / 3600 / facts["first"]["tokens_per_s"] * 1e6
    assert facts["cost_per_million_tokens"]["first"] == pytest.approx(cost, rel=1e-6)
    assert f"{cost:,.4g}" in page
    cheapest, dearest = facts["cost_per_million_tokens"]["first_interval_90"]
    assert cheapest <= facts["cost_per_million_tokens"]["first"]
    # Two seeds that differ have a wide interval: where it reaches down to no throughput, no cost is the highest.
    assert dearest is None or dearest >= facts["cost_per_million_tokens"]["first"]


def test_a_price_changes_no_simulation(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = answer(f"--cache {cache}")
    monkeypatch.setitem(evaluations.FUNCTIONS, "runs", lambda *_: pytest.fail("this was answered before"))
    assert answer(f"--cache {cache} --gpu-price 3")["first"] == before["first"]


def test_pauses_are_taken_from_a_run_at_the_most_workers_that_a_choice_can_have(cache: Path, tmp_path: Path) -> None:
    deaths = replace(LEFT, detect_us=4000, abort_us=50_000, plan_us=0, regroup_us=80_000)
    write_record(tmp_path / "record.jsonl", [Started("train", "a"), deaths])
    command = f"--cache {cache} --constants {tmp_path} --set recycle.detect=2s"
    found = answer(command)["question"]["constants"]["recycle"]
    assert found["detect_us"] == 2_000_000  # --set comes last
    assert found["abort_us"] == 50_000
    assert found["regroup_us"] == run_constants([deaths]).regroup_at_us(4)  # type: ignore[union-attr]
    assert "- pauses as measured with" in output_of(f"{JOB} {command}")


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ("--gpus 6 --gpus-per-server 4", "there are 6 GPUs in servers of 4"),
        ("--gpus 0", "there are 0 GPUs"),
        ("--batch 0", "the batch is 0 samples"),
        ("--seeds 0", "the number of seeds is 0"),
        ("--days 0", "the number of days is 0"),
        ("--batch-tolerance 1", "the tolerance of the batch is 1"),
        ("--memory-reserve 1", "the reserve of memory is 1"),
        ("--systems ideal", "ideal is no system that can be chosen"),
        ("--systems nobody", "'nobody' is not a system"),
        ("--gpu-price 0", "the price must be above 0"),
        ("--mtbf soon", "soon"),
        ("--context-parallel 2", "the context-parallel degree is 2"),
        ("--failures llama3", "--mtbf and --failures both say how servers fail"),
        ("--profile profile.json", "--model and --profile both say what ops cost"),
        ("--sequence 512", "--sequence goes with --profile"),
        ("--model gpt-145.6b", "no system can train gpt-145.6b on 4 a100-80"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_wrong_input_gets_one_sentence(changed: str, sentence: str) -> None:
    assert sentence in refusal(f"{JOB} {changed}")


def test_without_a_model_or_a_failure_rate_the_missing_option_is_named() -> None:
    assert "--model is missing" in refusal("advise --gpus 4 --batch 8 --mtbf 3d --repair 6h")
    assert "--repair is missing: give --mtbf and --repair of a server, or --failures" in refusal(
        "advise --model gpt3-6.7b --gpu a100-80 --gpus 8 --batch 8 --mtbf 3d"
    )


def test_failures_as_published_say_where_they_are_from(cache: Path) -> None:
    job = JOB.replace("--mtbf 3d --repair 6h", "--failures llama3,times=100")
    page = output_of(f"{job} --cache {cache} --systems recycle,replica-drop")
    assert "causes and repairs by llama3: Llama 3 (arXiv 2407.21783)" in page


def test_a_measured_profile_takes_the_place_of_a_model(cache: Path, tmp_path: Path) -> None:
    """A micro-batch of two samples takes 120 ms: four devices train 66.7 samples a second at most."""
    made = Profile.uniform(2, 20_000, 20_000, 20_000).with_equal_layers(4).to_json()
    fast = {"latency_us": 10, "bytes_per_us": 1e5}
    made |= {"taken": {**TAKEN, "samples": 2}, "stage_link": fast, "peer_link": fast}
    for stage in made["stages"]:
        stage |= {"activation_bytes": 1 << 20, "static_bytes": 16 << 20, "gradient_bytes": 4 << 20, "output_bytes": 1 << 16}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(made))
    command = f"advise --profile {path} --memory 1GiB --gpus 4 --gpus-per-server 1 --batch 16 --mtbf 3d --repair 6h --days 5"
    command += f" --seeds 2 --systems recycle,replica-drop,oobleck --cache {cache} --gpu-price 2"
    facts = json.loads(output_of(f"{command} --json"))
    first = facts["first"]
    assert first["tokens_per_s"] is None
    assert first["tensor_parallel"] == 1
    most = 4 * 2 / 0.120
    assert 0.8 * most < first["fault_free_samples_per_s"] < most
    assert facts["cost_per_million_samples"]["first"] == pytest.approx(8 / 3600 / first["samples_per_s"] * 1e6, rel=1e-5)
    page = output_of(command)
    assert "samples a second" in page
    assert "op times and memory are those of the profile" in page
    tokens = json.loads(output_of(f"{command} --sequence 100 --json"))
    assert tokens["first"]["tokens_per_s"] == pytest.approx(100 * first["samples_per_s"], rel=1e-5)


def test_the_verdict_names_the_pipelines_that_a_system_chose_itself(cache: Path) -> None:
    job = JOB.replace("--systems recycle,replica-drop,checkpoint-restart,oobleck", "--systems oobleck")
    command = f"{job} --batch 9 --gpus 5 --cache {cache}"
    first = json.loads(output_of(f"{command} --json"))["first"]
    verdict = next(line for line in output_of(command).splitlines() if line.startswith("**oobleck: "))
    sizes = re.match(r"\*\*oobleck: (\d+) pipelines? of (\d+) stages?(?: and (\d+) of (\d+))?, tensor-parallel degree 1", verdict)
    assert sizes, verdict
    one, deep, other, shallow = (int(size or 0) for size in sizes.groups())
    assert one * deep + other * shallow + first["spare_gpus"] == 5
    assert "9 micro-batches of 1 in all" in verdict


def test_a_difference_of_a_thousandth_is_called_a_tie() -> None:
    first, near, far = (
        FoundChoice(SystemChoice("recycle", Shape(2, 2, 4), 1, 0, 0), SimulatedRuns(rates, {}), 1000.0)
        for rates in ((990.0, 992.0), (989.5, 991.5), (900.0, 993.0))
    )
    assert closeness(first, near).startswith("The first choice is faster in 2 of 2 seeds, but take this for a tie")
    assert closeness(first, far) == "The first choice is faster in 1 of 2 seeds."
