"""`recycle train --shared-layers`: layers at measured or given costs, uneven stages cut from the start, and `auto`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from recycle.cli.training.job_from_config import TrainingJobFactory
from recycle.cli.training.plan_choice import choose_plan
from recycle.cli.training.train import prepare
from recycle.cli.training.train_config import TrainConfig, load_config
from recycle.cli.training.train_sections import ClusterSection, ModelSection
from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.layer_shares import LayerShare
from recycle.core.plans.plan import Plan
from recycle.core.profile import Profile, StageProfile
from tests.cli.commands import refusal, run

pytestmark = pytest.mark.timeout(240)
SMALL = "train --pipelines 2 --stages 2 --microbatches 4 --steps 3 --layers 6 --width 32 --heads 2 --context 16 --exact --json"


def uneven_profile(path: Path) -> Path:
    """Two stages of three layers; the last layer of all takes as long as three others."""
    light = StageProfile(300, 390, 270, 660, activation_bytes=300, weight_held_bytes=150, static_bytes=3000)
    heavy = replace(light, forward_us=500, input_us=650, weight_us=450, fused_us=1100)
    head = LayerShare(3, 3, 3)
    profile = Profile((light, heavy), layers=((LayerShare(),) * 3, (LayerShare(), LayerShare(), head)))
    path.write_text(json.dumps(profile.to_json()))
    return path


def test_uneven_stages_are_cut_from_the_start_and_train_the_same(tmp_path: Path) -> None:
    profile = uneven_profile(tmp_path / "profile.json")
    folders = {shared: tmp_path / f"shared-{shared}" for shared in (0, 1, 2)}
    hashes = {
        run(f"{SMALL} --profile {profile} --shared-layers {shared} --out {folder}").facts["weights_sha256"]
        for shared, folder in folders.items()
    }
    plans = {shared: Plan.load(folder / "plan.json") for shared, folder in folders.items()}
    assert len(hashes) == 1
    assert not plans[0].cuts
    assert plans[1].cuts
    assert plans[2].cuts
    assert plans[1].period_us < 0.95 * plans[0].period_us
    assert plans[2].period_us < 0.95 * plans[0].period_us


def prepared(**cluster: object) -> tuple[TrainingJobFactory, Plan]:
    model = ModelSection(layers=6, width=32, heads=2, context=16)
    return prepare(TrainConfig(ClusterSection(2, 2, 4, **cluster), model))  # type: ignore[arg-type]


def test_layers_that_are_shared_are_measured_unless_costs_are_given() -> None:
    _, measured = prepared(shared_layers=1)
    assert measured.problem.profile.name.startswith("measured on ")
    assert [len(own) for own in measured.problem.profile.layers] == [3, 3]
    assert measured.problem.static_bytes(0) > measured.problem.profile.stages[0].static_bytes > 0
    _, given = prepared(shared_layers=1, costs="10,13,9")
    assert [set(own) for own in given.problem.profile.layers] == [{LayerShare()}] * 2
    _, alone = prepared()
    assert alone.problem.profile.name == "costs 10,13,9 comm 0"
    assert alone.problem.profile.layers == ()


def test_auto_says_what_it_chose_and_the_run_keeps_it(tmp_path: Path) -> None:
    profile = uneven_profile(tmp_path / "profile.json")
    done = run(f"{SMALL} --profile {profile} --shared-layers auto --out {tmp_path / 'run'}")
    said = [line for line in done.err.splitlines() if line.startswith("neighbouring stages share ")]
    assert len(said) == 1
    kept = load_config(tmp_path / "run" / "config.toml").cluster.shared_layers
    assert isinstance(kept, int)
    assert kept >= 1
    assert f"share {kept} layer" in said[0]
    assert " of the best throughput " in said[0]
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert plan.problem.shared_layers == kept
    assert done.facts["weights_sha256"] == run(f"{SMALL}").facts["weights_sha256"]


def test_auto_shares_nothing_where_memory_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = uneven_profile(tmp_path / "profile.json")
    # 3,000 bytes of state a stage, and 1,000 more for a layer of the neighbour.
    factory, plan = prepared(profile=str(profile), shared_layers="auto", memory="4KiB")
    assert factory.config.cluster.shared_layers == plan.problem.shared_layers == 0
    assert "1 would not fit into its memory" in capsys.readouterr().err


def test_a_plan_says_itself_how_many_layers_are_shared(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    cluster = ClusterSection(2, 2, 4, profile=str(uneven_profile(tmp_path / "profile.json")), shared_layers=1)
    choose_plan(cluster).save(path)
    _, plan = prepared(plan=str(path), shared_layers="auto")
    assert plan.problem.shared_layers == 1


@pytest.mark.parametrize("value", ["few", "1.5"])
def test_anything_else_than_a_number_or_auto_is_refused(value: str) -> None:
    assert f'"{value}" is not a whole number from 0 to 1000000000, or auto' in refusal(f"{SMALL} --shared-layers {value}")


@pytest.mark.parametrize("value", ["few", -1, True, 1.0])
def test_a_file_says_a_number_or_auto(value: object) -> None:
    with pytest.raises(UserError, match=r"cluster.shared_layers is .*, but it must be a whole number .* or auto"):
        ClusterSection(shared_layers=value)  # type: ignore[arg-type]
    assert ClusterSection(shared_layers="auto").shared_layers == "auto"


def test_a_worker_that_is_known_to_be_slow_gets_less_to_do_from_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = run(f"{SMALL} --costs 1000,1300,900 --speed W1_1=0.5 --shared-layers 1 --out {folder}")
    plan = Plan.load(folder / "plan.json")
    assert plan.problem.speeds == ((Worker(1, 1), 0.5),)
    num_ops = {str(row.worker): len(row) for row in plan.rows}
    assert num_ops["W1_1"] < num_ops["W0_1"]
    assert done.facts["weights_sha256"] == run(SMALL).facts["weights_sha256"]
    assert "W9_1" in refusal(f"{SMALL} --speed W9_1=0.5")
