"""Which jobs can go on from a checkpoint: those that compute the same, in any shape; the others hear why not in one sentence."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recycle
from recycle.core.cluster import Shape
from recycle.core.errors import ForeignRun
from recycle.models.gpt import GptConfig, gpt_stages
from recycle.runtime.checkpoint.compatibility import keep_model_names, refuse_foreign
from recycle.runtime.checkpoint.files import Checkpoint, StageFile, plain, stage_file, step_folder, write_manifest
from recycle.runtime.job import Job
from recycle.runtime.options import CheckpointOptions, TrainOptions
from tests.runtime.jobs import Numbers, adamw, loss

SAMPLES = [(torch.ones(4), torch.ones(4))] * 64


class Whole(nn.Module):
    """A stage that does not say what its layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x)
        return made


def linears(*cuts: int, width: int = 4) -> list[nn.Module]:
    layers = [nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4), nn.Linear(4, 4)]
    return recycle.cut(nn.Sequential(*layers), cuts)


def tied(num_stages: int, is_tied: bool = True) -> list[nn.Module]:
    return gpt_stages(GptConfig(vocabulary=8, context=4, width=4, num_heads=1, ties_embeddings=is_tied), num_stages, 0)


def describe(shape: tuple[int, int, int], stages: Sequence[nn.Module], data: Any = SAMPLES, seed: int = 0) -> Mapping[str, Any]:
    options = TrainOptions(seed, checkpoint=CheckpointOptions(about={"model.width": 4}))
    return plain(Job(Shape(*shape), stages, data, loss, adamw, 3, options=options).fingerprint())


def checkpoint_of(fingerprint: Mapping[str, Any]) -> Checkpoint:
    files = tuple(StageFile(stage_file(stage), 1, "") for stage in range(fingerprint["stages"]))
    return Checkpoint(4, Path("checkpoints") / step_folder(4), files, fingerprint)


def earlier(fingerprint: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fingerprint as an earlier release wrote it."""
    kept = {key: value for key, value in fingerprint.items() if key not in ("layers", "data_by_pipeline")}
    shape = {f"cluster.{key}": fingerprint[key] for key in ("pipelines", "stages", "microbatches")}
    return kept | {"about": fingerprint["about"] | shape}


BASE = (2, 2, 6), linears(2)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (describe(*BASE), describe(*BASE)),
        (describe(*BASE), describe((3, 2, 4), linears(2))),
        (describe(*BASE), describe((1, 4, 12), linears(1, 2, 3))),
        (describe(*BASE), describe((2, 2, 6), linears(1))),
        (describe(*BASE), describe((12, 1, 1), linears())),
        (describe((2, 4, 3), tied(4)), describe((3, 1, 2), tied(1))),
        (describe((2, 1, 3), tied(1)), describe((1, 3, 6), tied(3))),
        (describe((2, 1, 6), [Whole()]), describe((4, 1, 3), [Whole()])),
        (describe((2, 1, 6), [Whole()], Numbers()), describe((2, 1, 6), [Whole()], Numbers())),
        (describe((2, 2, 6), linears(2), Numbers()), describe((2, 3, 6), linears(1, 2), Numbers())),
        (earlier(describe(*BASE)), describe(*BASE)),
        (earlier(describe(*BASE)), describe((4, 2, 3), linears(2))),
        (earlier(describe((2, 1, 6), [Whole()], Numbers())), describe((2, 1, 6), [Whole()], Numbers())),
    ],
)
def test_a_job_that_computes_the_same_goes_on(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    refuse_foreign(checkpoint_of(old), new)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            describe(*BASE),
            describe((3, 2, 6), linears(2)),
            (
                "made with 12 micro-batches in a step (2 pipelines of 6), but this job has 18 (3 of 6): choose pipelines and "
                "micro-batches with the product 12"
            ),
        ),
        (
            describe((2, 2, 6), linears(2), Numbers()),
            describe((3, 2, 4), linears(2), Numbers()),
            "made with 2 pipelines, but this job has 3, and its data are micro-batches by pipeline: resume with 2 pipelines",
        ),
        (
            describe((1, 2, 6), [Whole(), Whole()]),
            describe((1, 1, 6), [Whole()]),
            "has 2 stages, but this job has 1, and a stage of it or of this job does not say what its layers are: resume with 2",
        ),
        (
            describe((1, 2, 6), linears(2)),
            describe((1, 1, 6), [Whole()]),
            "has 2 stages, but this job has 1, and a stage of it or of this job does not say what its layers are: resume with 2",
        ),
        (
            earlier(describe(*BASE)),
            describe((2, 1, 6), linears()),
            (
                "has 2 stages, but this job has 1, and the checkpoint is of an earlier release, which does not say "
                "what layers its stages have: resume with 2 stages, and its next checkpoint can be resumed with 1"
            ),
        ),
        (
            describe(*BASE),
            describe((2, 1, 6), linears(width=5)),
            'was made by another job: its layers.0.weight is [4, 4, "float32"], but this job\'s is [5, 4, "float32"]',
        ),
        (describe(*BASE), describe((2, 1, 6), linears(), seed=1), "was made by another job: its seed is 0, but this job's is 1"),
        (
            describe((2, 2, 6), linears(2)),
            describe((2, 1, 6), [nn.Sequential(*linears()[0], nn.Linear(4, 4))]),
            "was made by another job: its layers.4 is not there",
        ),
        (
            describe((2, 2, 3), tied(2)),
            describe((2, 1, 3), tied(1, is_tied=False)),
            'its ties is [[[0, "0.tokens.weight"], [3, "2.weight"]]], but this job\'s is []',
        ),
    ],
)
def test_a_job_that_computes_something_else_is_refused(old: Mapping[str, Any], new: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(ForeignRun) as refused:
        refuse_foreign(checkpoint_of(old), new)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_run_keeps_the_names_of_its_tensors_in_another_shape(tmp_path: Path) -> None:
    old, new = describe((2, 2, 3), tied(2)), describe((2, 1, 3), recycle.recut(tied(2), 1))
    assert keep_model_names(new, tmp_path) == new
    folder = tmp_path / step_folder(4)
    folder.mkdir()
    write_manifest(Checkpoint(4, folder, checkpoint_of(old).files, old))
    kept = keep_model_names(new, tmp_path)
    assert old["layers"]["model"] == kept["layers"]["model"] != new["layers"]["model"]
    assert kept["layers"]["names"] == new["layers"]["names"]
