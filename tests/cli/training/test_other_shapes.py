"""`recycle train --resume` with another shape, for the built-in GPT and a job file: the same weights; and `recycle export`."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recycle.cli.training.train_config import load_config
from recycle.models.gpt import GptConfig, gpt_stages
from tests.cli.commands import refusal, run

pytestmark = pytest.mark.timeout(240)
MODEL = "--layers 4 --width 16 --heads 2 --context 16"
EVERYTHING = "--exact --dropout 0.1 --tied --max-norm 0.5 --schedule cosine --warmup 1"
JOB = """
import torch
from torch import nn

import recycle


class Ones(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        return torch.full((4,), number / 64), torch.ones(1)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def job():
    torch.manual_seed(3)
    parts = {"embed": nn.Linear(4, 8), "curve": nn.Tanh(), "drop": nn.Dropout(0.5), "head": nn.Linear(8, 1)}
    options = recycle.TrainOptions(is_exact=True, seed=5)
    stages = recycle.cut(nn.Sequential(parts_of(parts)), [1, 3])
    loss = nn.functional.mse_loss
    return recycle.Job(recycle.Shape(2, 3, 2), stages, Ones(), loss, optimizer, 4, samples=2, options=options)


def parts_of(parts):
    from collections import OrderedDict

    return OrderedDict(parts)
"""


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of six workers, cut off after its second step, and the weights after its fourth."""
    folder = tmp_path_factory.mktemp("gpt") / "run"
    shape = "--pipelines 2 --stages 3 --microbatches 3 --dead W1_2"
    facts = run(f"train {shape} {MODEL} {EVERYTHING} --steps 4 --every 2 --json --out {folder}").facts
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    return folder, facts["weights_sha256"]


@pytest.fixture
def copy(gpt: tuple[Path, str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(gpt[0], tmp_path / "copy"))


@pytest.mark.parametrize(
    "flags",
    [
        "--pipelines 1 --stages 1",
        "--pipelines 3 --stages 2",
        "--stages 4 --dead W0_3",
        "--pipelines 2 --stages 2 --shared-layers 1 --dead W0_1",
        "--pipelines 6 --microbatches 1 --stages 1",
    ],
)
def test_a_run_goes_on_bit_for_bit_in_another_shape(flags: str, copy: Path, gpt: tuple[Path, str]) -> None:
    facts = run(f"train --resume {copy} {flags} --json").facts
    assert (facts["weights_sha256"], facts["steps"], facts["warnings"]) == (gpt[1], 4, [])
    cluster = load_config(copy / "config.toml").cluster
    assert cluster.pipelines * cluster.microbatches == 6
    assert "steps      4" in run(f"report {copy}").out


def test_a_run_goes_there_and_back(copy: Path, gpt: tuple[Path, str]) -> None:
    run(f"train --resume {copy} --pipelines 3 --stages 1 --every 1 --json")
    shutil.rmtree(copy / "checkpoints" / "step-00000004")
    again = run(f"train --resume {copy} --pipelines 2 --stages 3 --json").facts
    assert again["weights_sha256"] == gpt[1]
    assert not (copy / "checkpoints" / "step-00000002").exists()  # it went on from step 3, in the shape between


@pytest.mark.parametrize(
    ("flags", "code", "sentence"),
    [
        (
            "--pipelines 4",
            14,
            "has 6 micro-batches in a step, which 4 pipelines cannot share equally: choose 1, 2, 3 or 6 pipelines",
        ),
        ("--microbatches 4", 14, "made with 6 micro-batches in a step (2 pipelines of 3), but this job has 8 (2 of 4)"),
        ("--stages 5", 10, "5 stages are more than the 4 layers of the model"),
        ("--stages 2 --seed 9", 14, "has training.seed = 1, not 9"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_in_a_sentence(flags: str, code: int, sentence: str, copy: Path) -> None:
    assert sentence in refusal(f"train --resume {copy} {flags}", code)


def test_a_run_is_exported_as_one_model_whatever_its_shape(copy: Path, tmp_path: Path) -> None:
    files = [tmp_path / "two.safetensors", tmp_path / "four.safetensors", tmp_path / "step.safetensors"]
    assert f"{files[0]}: 53 tensors, " in run(f"export {copy} --out {files[0]}").out
    run(f"train --resume {copy} --pipelines 1 --stages 4 --json")
    facts = json.loads(run(f"export {copy} --out {files[1]} --json").out)
    assert (facts["num_steps"], facts["num_tensors"], facts["size_bytes"]) == (4, 53, files[1].stat().st_size)
    run(f"export {copy} --step 2 --out {files[2]}")
    two, four, step = map(load_file, files)
    config = GptConfig(context=16, width=16, num_heads=2, num_layers=4, ties_embeddings=True)
    (model,) = gpt_stages(config, 1, 0)
    assert two.keys() == four.keys() == model.state_dict().keys()
    assert all(torch.equal(two[name], step[name]) for name in two)
    assert not torch.equal(two["head.weight"], four["head.weight"])
    assert torch.equal(four["head.weight"], four["embedding.tokens.weight"])
    model.load_state_dict(four)


def test_what_cannot_be_exported_is_said(copy: Path, tmp_path: Path) -> None:
    assert "there is no whole checkpoint" in refusal(f"export {tmp_path} --out {tmp_path / 'm'}", 15)
    assert "cannot read" in refusal(f"export {copy} --step 3 --out {tmp_path / 'm'}", 2)
    path = copy / "checkpoints" / "step-00000002" / "stage-1.safetensors"
    body = bytearray(path.read_bytes())
    body[-3] ^= 4
    path.write_bytes(body)
    assert "does not have the bytes that were written" in refusal(f"export {copy} --step 2 --out {tmp_path / 'm'}", 2)
    assert not (tmp_path / "m").exists()


@pytest.fixture
def job_file(tmp_path: Path) -> Iterator[Path]:
    path = list(sys.path)
    (tmp_path / "shaped_job.py").write_text(JOB)
    yield tmp_path / "shaped_job.py"
    sys.path[:] = path
    sys.modules.pop("shaped_job", None)


def test_the_model_of_a_job_file_is_cut_again(job_file: Path, tmp_path: Path) -> None:
    weights = run(f"train {job_file} --json").facts["weights_sha256"]
    out = tmp_path / "run"
    run(f"train {job_file} --steps 2 --json --out {out}")
    run(f"train --resume {out} --steps 3 --pipelines 1 --stages 2 --json")
    facts = run(f"train --resume {out} --steps 4 --pipelines 4 --stages 4 --json").facts
    assert facts["weights_sha256"] == weights
    run(f"export {out} --out {tmp_path / 'model'}")
    assert load_file(tmp_path / "model").keys() == {"embed.weight", "embed.bias", "head.weight", "head.bias"}
    assert "5 stages cannot be made of 4 layers" in refusal(f"train --resume {out} --steps 5 --stages 5", 10)
