"""The examples do what they say, and every snippet and every refusal in the guide is as it stands there."""

import copy
import re
import time
from functools import partial
from pathlib import Path
from threading import Lock

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import recycle
from examples import sequential
from recycle.core import errors
from recycle.core.events.record import Stepped
from recycle.core.events.record_file import read_record
from tests.warm_processes import WarmProcess

pytestmark = pytest.mark.timeout(240)
torch.set_num_threads(1)
ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "own-model.md").read_text(encoding="utf-8")


def run(script, *arguments, folder, prepare=None):
    """Run a script as a user does, and return what it printed."""
    process = WarmProcess([script, *arguments], folder, is_script=True, prepare=prepare)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def test_the_sequential_example_learns_and_a_dead_worker_changes_no_bit(tmp_path):
    printed = run(ROOT / "examples" / "sequential.py", "--steps", 12, "--out", "run", folder=tmp_path)
    (first, last, dead), (_, _, alive) = re.findall(r"loss (\S+) at first, (\S+) at last; weights sha256 (\w{64})", printed)
    assert float(last) < 0.7 * float(first)
    assert dead == alive
    assert printed.splitlines()[-1] == "the weights are the same, bit for bit"
    steps = [event for event in read_record(tmp_path / "run" / "record.jsonl") if isinstance(event, Stepped)]
    assert (f"{steps[0].loss:.4f}", f"{steps[-1].loss:.4f}") == (first, last)
    assert len(steps) == 12


def test_the_sequential_example_explains_itself_and_refuses_in_one_sentence(capsys, tmp_path):
    explains_itself(sequential, capsys, tmp_path)


def explains_itself(example, capsys, tmp_path):
    """Ask an example for its help, and give it wrong input."""
    with pytest.raises(SystemExit, match="0"):
        example.main(["--help"])
    printed = capsys.readouterr().out
    assert "--steps" in printed
    assert "--out FOLDER" in printed
    (tmp_path / "file").touch()
    for wrong, words in ((["--steps", "0"], "at least 1"), (["--out", str(tmp_path / "file" / "run")], "file")):
        with pytest.raises(SystemExit, match="2"):
            example.main(wrong)
        assert words in capsys.readouterr().err.splitlines()[-1]


def test_the_snippets_of_the_guide_run_one_after_the_other(tmp_path):
    script, *rest = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
    assert len(rest) == 7
    whole = "\n".join([script, *rest])
    (tmp_path / "mine.py").write_text(whole, encoding="utf-8")
    printed = run("mine.py", folder=tmp_path)
    steps = re.findall(r"^step (\d+) loss (\S+) norm", printed, re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(11, 21))
    # An untrained model has a loss of about 1; what was loaded does about as well as the last steps did.
    assert float(re.search(r"^trained: (\S+)$", printed, re.MULTILINE)[1]) == pytest.approx(float(steps[-1][1]), rel=0.25)


def locked(lock, made, targets):
    return nn.functional.mse_loss(made, targets)


class Numbered(nn.Linear):
    def forward(self, x):
        return {0: super().forward(x)}


class Detached(nn.Linear):
    def forward(self, x):
        return super().forward(x).detach()


class Random(TensorDataset):
    def __init__(self):
        super().__init__(torch.ones(16, 2, 4), torch.ones(16, 2, 4))

    def __getitem__(self, number):
        return torch.full((2, 4), float(time.monotonic_ns() % 10**6)), torch.ones(2, 4)


def scheduler():
    return torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(linear().parameters(), lr=0.1))


PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau


class Rounded(nn.Linear):
    def forward(self, x):
        return super().forward(x).long()


def linear():
    return nn.Linear(4, 4)


# Workers must not need this module: it imports more than they have time for.
SIXTEEN = TensorDataset(torch.ones(16, 2, 4), torch.ones(16, 2, 4))

RAGGED = [(torch.ones(length, 4), torch.ones(length, 4)) for length in range(1, 17)]


RESUME = recycle.CheckpointOptions(resume=True)


def train(
    *stages,
    dataset=SIXTEEN,
    loss=nn.functional.mse_loss,
    steps=1,
    samples=2,
    out=None,
    shape=(2, 2, 2),
    optimizer=None,
    **options,
):
    plan = recycle.solve(recycle.problem(*shape, costs=(1, 1, 1)))
    modules = stages or (linear(), linear())
    optimizer = optimizer or partial(torch.optim.SGD, lr=0.1)
    options = recycle.TrainOptions(failures=recycle.FailureOptions(recovers=False), **options)
    return recycle.train(plan, modules, dataset, loss, optimizer, steps=steps, samples=samples, out=out, options=options)


def test_modules_are_after_training_what_they_were():
    stages = linear(), linear()
    before = copy.deepcopy(stages)
    trained = train(*stages, steps=3)
    assert trained.losses[-1] < trained.losses[0]
    for stage, other in zip(stages, before, strict=True):
        torch.testing.assert_close(stage.state_dict(), other.state_dict(), rtol=0, atol=0)


def train_twice(folder, **options):
    train(out=folder)
    train(out=folder, **options)


def resume_with_other_stages(folder):
    train(out=folder)
    train(linear(), linear(), linear(), out=folder, shape=(2, 3, 2), checkpoint=RESUME)


REFUSED = {
    "cutting something that is neither an `nn.Sequential` nor built like a causal language model": lambda folder: recycle.cut(
        linear(), [1]
    ),
    "cuts that leave a stage empty": lambda folder: recycle.cut(nn.Sequential(linear(), linear()), [1, 1]),
    "another number of stages than the plan has": lambda folder: train(linear()),
    "a stage that returns an object, or a dict whose keys are no texts": lambda folder: train(Numbered(4, 4), linear()),
    "a stage that returns only integers": lambda folder: train(Rounded(4, 4), linear()),
    "a stage or a loss that detaches what it returns": lambda folder: train(Detached(4, 4), linear()),
    "a loss for each sample": lambda folder: train(loss=partial(nn.functional.mse_loss, reduction="none")),
    "a BatchNorm with running statistics": lambda folder: train(linear(), nn.BatchNorm1d(2)),
    "a stage that changes its input in place": lambda folder: train(linear(), nn.ReLU(inplace=True)),
    "`max_norm` of 0 or below": lambda folder: train(max_norm=-1.0),
    "a dataset that does not fill a step": lambda folder: train(samples=5),
    "a dataset that gives other samples when it is asked again": lambda folder: train(dataset=Random()),
    "an optimizer, not a function that makes one": lambda folder: train(optimizer=torch.optim.SGD(linear().parameters(), lr=0.1)),
    "a scheduler of torch": lambda folder: train(schedule=scheduler()),
    "a scheduler that needs losses, or changes the momentum": lambda folder: recycle.TorchSchedule(PLATEAU, 0.1)(0),
    "LBFGS, SparseAdam, an optimizer of other parameters": lambda folder: train(optimizer=torch.optim.LBFGS),
    "samples of different shapes or structures": lambda folder: train(dataset=RAGGED),
    "micro-batches of different shapes without padding": lambda folder: train(dataset=RAGGED, samples=1),
    "a loss or data with an open file, a lock or a connection": lambda folder: train(loss=partial(locked, Lock())),
    "`resume` without `out`": lambda folder: train(checkpoint=RESUME),
    "`resume` where no checkpoint is": lambda folder: train(out=folder, checkpoint=RESUME),
    "`out` where another run is": train_twice,
    "`resume` with another seed": partial(train_twice, checkpoint=RESUME, seed=1),
    "`resume` with another number of micro-batches in a step": partial(train_twice, checkpoint=RESUME, shape=(2, 2, 3)),
    "`resume` with other stages, of which one does not say what its layers are": resume_with_other_stages,
}
ROWS = dict(re.findall(r"^\| ([^|]+) \| `(\w+)` \|", GUIDE.partition("## What is refused")[2], re.MULTILINE))


def test_the_table_of_the_guide_has_a_trial_for_every_row():
    assert list(ROWS) == list(REFUSED)


@pytest.mark.parametrize("what", ROWS)
def test_what_the_guide_says_is_refused_is_refused_in_one_sentence(what, tmp_path):
    kind = getattr(errors, ROWS[what])
    with pytest.raises(kind) as refusal:
        REFUSED[what](tmp_path / "run")
    assert type(refusal.value) is kind
    assert len(str(refusal.value).splitlines()) == 1
