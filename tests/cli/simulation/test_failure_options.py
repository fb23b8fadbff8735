"""`recycle simulate` and `recycle trace make` with failure models, spares and prices, and what a user can get wrong."""

import json
from typing import Any

import pytest

from recycle.core.events.trace import Trace
from tests.cli.commands import output_of, refusal
from tests.sim.quick_plans import plan_quickly

JOB = "--model layers=6,hidden=2048,heads=16,sequence=2048,vocabulary=1 --gpu a100-80 --pipelines 3 --stages 2 --microbatches 4"
FEW = "--systems recycle,oobleck,checkpoint-restart,checkpoint-restart-spare,ideal"


@pytest.fixture(autouse=True)
def _plan_here(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_quickly(monkeypatch)


def facts(arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output_of(f"simulate {JOB} --no-cache {arguments} --json"))
    return found


def test_failures_come_from_a_published_model_and_from_the_seed() -> None:
    command = f"{FEW} --failures llama3,times=2000 --hours 24"
    found = facts(command)
    assert found["failure_model"] == "llama3,times=2000"
    # 6 GPUs x 2000 x 419 / (16384 x 54) are 5.7 failures a day; those of a machine or rack of 8 or 16 GPUs take all six workers.
    assert 2 <= found["failures"] <= 40
    assert found == facts(command)
    assert found["failures"] != facts(f"{command} --seed 5")["failures"]


def test_spares_keep_throughput_and_are_paid_for() -> None:
    alone, spared = (facts(f"{FEW} --mtbf 12h --hours 48 --gpu-price 3.6 --spares {num}") for num in (0, 6))
    for name in ("recycle", "checkpoint-restart"):
        assert spared["systems"][name]["throughput"] > alone["systems"][name]["throughput"]
        paid = spared["systems"][name]["paid"]
        assert (paid["gpus"], alone["systems"][name]["paid"]["gpus"]) == (12, 6)
        tokens_per_s = spared["systems"][name]["throughput"] * 2048
        assert paid["tokens_per_s_per_gpu"] == pytest.approx(tokens_per_s / 12)
        # 12 GPUs at 3.6 an hour cost 0.012 a second.
        assert paid["cost_per_million_tokens"] == pytest.approx(0.012 / tokens_per_s * 1e6, abs=1e-6)


def test_the_endless_spares_of_checkpoint_restart_are_paid_for_as_far_as_it_needs_them() -> None:
    found = facts(f"{FEW} --interval 10h --hours 48")["systems"]
    assert found["checkpoint-restart-spare"]["paid"]["gpus"] == 6 + 4  # four of six workers fail, and none returns
    assert found["checkpoint-restart"]["paid"]["gpus"] == 6


def test_the_table_shows_what_is_paid_for() -> None:
    text = output_of(f"simulate {JOB} {FEW} --no-cache --mtbf 12h --hours 48 --spares 2 --gpu-price 2")
    row = next(line for line in text.splitlines() if line.startswith("system") and "paid GPUs" in line)
    assert row.split("  ")[-1].strip() == "cost of a million tokens"
    assert "cost of a million" not in output_of(f"simulate {JOB} {FEW} --no-cache --mtbf 12h --hours 48 --spares 2")


def test_a_hang_costs_some_systems_minutes_and_recycle_seconds(tmp_path) -> None:
    path = tmp_path / "trace.csv"
    nodes = "".join(f"0,add,W{p}_{s}\n" for p in range(3) for s in range(2))
    path.write_text(nodes + "3600000,hang,W1_1\n7200000,add,W1_1\n# end 14400000\n")
    pauses = {
        name: run["pauses_us"]["hang"] / 1e6 for name, run in facts(f"--trace {path}")["systems"].items() if run["pauses_us"]
    }
    assert (pauses["recycle"], pauses["oobleck"], pauses["replica-drop"]) == (10, 600, 60)


def test_a_trace_of_a_model_is_written_with_its_hangs(tmp_path) -> None:
    path = tmp_path / "trace.csv"
    text = output_of(f"trace make --kind model --failures llama3,times=30 --nodes 64 --days 30 --out {path}")
    trace = Trace.load(path)
    assert f"{trace.num_hangs} of them hang" in text
    assert trace.num_hangs > 0
    assert path.read_text().startswith(
        "# recycle trace make --kind model --nodes 64 --failures llama3,times=30 --days 30 --seed 1\n"
    )


def test_the_help_lists_the_models_with_their_sources() -> None:
    text = output_of("simulate --help")
    for words in ("llama3", "rsc1", "rsc2", "arXiv 2407.21783", "arXiv 2410.21680", "mtbf=TIME"):
        assert words in text


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (f"simulate {JOB} --failures llama2", "'llama2' is not a failure model: choose from llama3, rsc1, rsc2"),
        (f"simulate {JOB} --failures llama3 --mtbf 1d", "--mtbf and --failures say the same thing"),
        (f"simulate {JOB} --failures llama3 --rejoin 1h", "leave --rejoin out, or write repair=12h"),
        (f"simulate {JOB} --spares -1", "the number of spares is -1"),
        (f"simulate {JOB} --gpu-price 0", "the price must be above 0"),
        ("trace make --kind model --nodes 4 --days 1", "--kind model needs --failures"),
        ("trace make --kind model --failures llama3 --gpus 0 --nodes 4 --days 1", "number of GPUs of a node is 0"),
        (
            "trace make --kind poisson --mtbf 1d --failures llama3 --nodes 4 --days 1",
            "--failures means nothing for --kind poisson",
        ),
    ],
)
def test_a_mistake_is_answered_with_one_sentence(command: str, sentence: str) -> None:
    assert sentence in refusal(command)
