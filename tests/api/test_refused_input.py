"""What a user may give by mistake: `recycle.train` answers with one sentence that says what, which and what to do."""

import os
import re
import signal
from functools import partial

import pytest
import torch
from torch import nn

import recycle
from recycle.core.errors import ForeignRun, Stopped, Uncuttable, Unsendable, UserError
from recycle.core.events.record import Stepped
from recycle.runtime.compute.microbatches import checked_pair
from tests.api import test_train_defaults as usual
from tests.api.test_train_defaults import WIDTH, Points

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(180)
QUIET = recycle.TrainOptions(quiet=True)


class Detached(nn.Module):
    def forward(self, x):
        return x.detach()


class Rounded(nn.Module):
    def forward(self, x):
        return x.long()


class Tree(nn.Module):
    """A model in whose structure no order of layers can be seen."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.left(x) + self.right(x)


def model(width=WIDTH):
    return nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH))


def train(stages, loss=nn.functional.mse_loss, out=None, options=QUIET, steps=2):
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return recycle.train((2, 2, 2), stages, Points(), loss, optimizer, steps=steps, samples=2, out=out, options=options)


def detached_loss(made, targets):
    return (made - targets).square().mean().detach()


@pytest.mark.parametrize(
    ("stages", "loss", "kind", "words"),
    [
        (
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), Detached()), nn.Linear(WIDTH, WIDTH)],
            nn.functional.mse_loss,
            Unsendable,
            "what stage 0 returns has no gradient path to the parameters of stage 0: it was detached, or made without gradients",
        ),
        (
            [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)],
            detached_loss,
            Unsendable,
            "the loss has no gradient path to the parameters of stage 1",
        ),
        (
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), Rounded()), nn.Linear(WIDTH, WIDTH)],
            nn.functional.mse_loss,
            Unsendable,
            "stage 0 returned torch.int64, which has no gradient: a stage returns floating point",
        ),
        (Tree(), nn.functional.mse_loss, Uncuttable, "a Tree cannot be cut"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_in_one_sentence(stages, loss, kind, words):
    with pytest.raises(kind, match=words) as caught:
        train(stages, loss)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_model_is_refused_in_one_sentence(tmp_path):
    train(model(), out=tmp_path)
    resume = recycle.TrainOptions(quiet=True, checkpoint=recycle.CheckpointOptions(resume=True))
    wrong = model(2 * WIDTH)
    with pytest.raises(ForeignRun, match=r"was made by another job: .* but this job's is .*; resume with the same job") as caught:
        train(wrong, out=tmp_path, options=resume, steps=4)
    assert "\n" not in str(caught.value)
    with pytest.raises(ForeignRun, match=r"stage 0 cannot be loaded from .* in the checkpoint, but .* in this job") as caught:
        recycle.load(recycle.cut(wrong, stages=2), tmp_path)
    assert "\n" not in str(caught.value)
    assert len(train(model(), out=tmp_path, options=resume, steps=4).losses) == 4  # nothing was lost


def test_a_run_that_was_stopped_says_how_python_goes_on(tmp_path):
    def stop(event):
        if isinstance(event, Stepped) and event.iteration == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    folder = tmp_path / "run"
    with pytest.raises(Stopped, match=rf"go on with: recycle.train\(..., out='{folder}', options=TrainOptions\("):
        usual.train(out=folder, steps=4000, watch=stop)


def test_evaluation_data_alone_are_refused_in_a_sentence():
    sentence = "evaluation is a list, but it must be recycle.EvaluationOptions: write EvaluationOptions(data)"
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}$"):
        recycle.TrainOptions(evaluation=[1, 2])


def test_a_sample_without_labels_is_told_which_entries_it_has():
    sentence = "sample 3 of the dataset is a dict with 'input_ids', but without an entry 'labels': add it"
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}$"):
        checked_pair({"input_ids": torch.ones(2)}, 3)
