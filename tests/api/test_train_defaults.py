"""`recycle.train` with nothing but a model: it survives a death, shows its progress, and records the run in a new folder."""

import os
import re
import signal
import time
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import recycle
from recycle.core.errors import FileProblem, UserError, WorkerFailed
from recycle.core.events.record import Placed, Recovered, Stepped
from recycle.runtime.job import Job
from recycle.runtime.job_checks import doubts_about
from tests.runtime.jobs import Numbers, greedy_plan, loss, small_stages

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(180)
WIDTH = 8
sgd = partial(torch.optim.SGD, lr=0.1)


class Points:
    def __len__(self):
        return 64

    def __getitem__(self, number):
        x = torch.linspace(0, 1, WIDTH) * number
        return x, x.sin()


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def train(shape=(2, 2, 2), model=None, dataset=None, optimizer=sgd, steps=4, loss=nn.functional.mse_loss, **options):
    data = dataset or Points(), loss, optimizer
    return recycle.train(shape, model or make_model(), *data, steps=steps, samples=2, **options)


class KillAt:
    """Kills the worker at a place when a step is done, as an out-of-memory killer would."""

    def __init__(self, place, step):
        self.place, self.step, self.pids, self.events = place, step, {}, []

    def __call__(self, event):
        self.events.append(event)
        if isinstance(event, Placed):
            self.pids[event.node] = event.pid
        if isinstance(event, Stepped) and event.iteration + 1 == self.step and (pid := self.pids.pop(self.place, None)):
            os.kill(pid, signal.SIGKILL)


def test_a_run_by_default_survives_a_death_shows_it_and_leaves_its_record(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    watch = KillAt("W1_1", 3)
    made = train(steps=40, watch=watch)
    assert len(made.losses) == 40
    assert any(isinstance(event, Recovered) for event in watch.events)
    shown = capfd.readouterr().err
    assert "the run is recorded in runs/1: recycle report runs/1 shows it" in shown
    assert re.search(r"^step 40 of 40  loss ", shown, re.MULTILINE)
    assert "W1_1" in shown
    assert {"plan.json", "record.jsonl", "summary.json", "checkpoints"} <= {each.name for each in (tmp_path / "runs/1").iterdir()}


def test_a_run_that_is_refused_names_no_folder_and_leaves_none(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="the loss has no gradient path"):
        train(model=make_model(), loss=lambda made, targets: (made - targets).square().mean().detach())
    assert "recorded" not in capfd.readouterr().err
    assert not list(tmp_path.glob("runs/*"))


def test_a_quiet_run_without_a_folder_shows_and_writes_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    train(out=None, options=recycle.TrainOptions(quiet=True))
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_shall_not_recover_ends_with_the_first_death():
    options = recycle.TrainOptions(quiet=True, failures=recycle.FailureOptions(recovers=False))
    with pytest.raises(WorkerFailed):
        train(steps=400, out=None, options=options, watch=KillAt("W1_1", 3))


def test_a_whole_model_with_convolutions_is_cut_by_what_they_compute():
    """The layers multiply 2304, 9216, 0 and 4096 times for a sample, but have 36, 144, 0 and 4096 weights."""
    from recycle.api.train import _modules

    images = [(torch.ones(1, 16, 16), torch.zeros(16)) for _ in range(16)]
    model = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 1, 1), nn.Flatten(), nn.Linear(256, 16))
    for data in (images, torch.utils.data.DataLoader(images, batch_size=2)):
        assert [len(stage) for stage in _modules(model, recycle.Shape(2, 2, 2), data, 2, recycle.TrainOptions())] == [2, 2]
    assert [len(stage) for stage in recycle.cut(model, stages=2)] == [3, 1]


def test_a_shape_a_tuple_and_a_plan_train_the_same():
    options = recycle.TrainOptions(quiet=True, is_exact=True)
    shapes = (2, 2, 2), recycle.Shape(2, 2, 2), greedy_plan((2, 2, 2))
    runs = [train(shape, out=None, options=options) for shape in shapes]
    assert len({run.weights_sha256 for run in runs}) == 1


@pytest.mark.parametrize("shape", [(2, 2), "2,2,2", None])
def test_something_else_than_a_plan_is_refused(shape):
    with pytest.raises(UserError, match="it must be a plan, or numbers of pipelines, stages and micro-batches"):
        train(shape, out=None)


def test_a_refused_run_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="a micro-batch has 0 samples"):
        recycle.train((2, 2, 2), make_model(), Points(), nn.functional.mse_loss, sgd, steps=1, samples=0)
    assert not (tmp_path / "runs").exists()


def test_folders_are_numbered_and_one_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    from recycle.api.run_folders import new_folder

    monkeypatch.chdir(tmp_path)
    assert [str(new_folder("mine/run-{number}")) for _ in range(2)] == ["mine/run-1", "mine/run-2"]
    (tmp_path / "file").write_text("")
    with pytest.raises(FileProblem, match=r"cannot make file/1: .*; name another folder with out, or give out=None"):
        new_folder("file/{number}")


def test_a_resumed_run_needs_the_name_of_its_folder():
    options = recycle.TrainOptions(quiet=True, checkpoint=recycle.CheckpointOptions(resume=True))
    with pytest.raises(UserError, match="resume goes on in a run folder: name it with out"):
        train(options=options)


# What is probably not meant.


def job(stages=None, dataset=None, optimizer=sgd, **options):
    plan = greedy_plan((2, 2, 2))
    return Job(plan, stages or small_stages(2), dataset or Numbers(), loss, optimizer, 2, options=recycle.TrainOptions(**options))


def test_parameters_in_low_precision_are_doubted_by_name():
    first, last = small_stages(2)
    (sentence,) = doubts_about(job([first, last.bfloat16()]))
    assert sentence.startswith("parameter 0.weight of stage 1 is torch.bfloat16, and no copy in float32 is kept")
    assert doubts_about(job()) == doubts_about(job(autocast=torch.bfloat16)) == doubts_about(job(autocast=torch.float16)) == []


def test_doubts_are_warnings_and_so_is_a_loss_that_is_no_number_of_a_quiet_run():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(dataset=NoNumbers(), out=None, steps=2, options=recycle.TrainOptions(quiet=True))
    assert [str(each.message) for each in seen if "loss" in str(each.message)] == ["the loss of step 1 is nan"]


class NoNumbers(Points):
    def __getitem__(self, number):
        return super().__getitem__(number)[0], torch.full((WIDTH,), torch.nan)


class Drawn(Points):
    def __getitem__(self, number):
        return torch.full((WIDTH,), float(time.monotonic_ns() % 10**6)), torch.rand(WIDTH)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"optimizer": torch.optim.AdamW([torch.zeros(1)], lr=0.5)},
            r"is an AdamW of some.*partial\(torch.optim.AdamW, lr=0.5\)",
        ),
        ({"optimizer": "adam"}, "the optimizer is a str, but it must be a function that makes one"),
        ({"dataset": Drawn()}, "the dataset gives other samples when it is asked again"),
    ],
)
def test_what_cannot_be_meant_is_refused(given, words):
    with pytest.raises(UserError, match=words):
        train(out=None, **given)


@pytest.mark.parametrize("schedule", [None, "cosine", torch.optim.lr_scheduler.StepLR, lambda: 1.0, lambda iteration: "1"])
def test_a_schedule_that_gives_no_number_is_refused(schedule):
    with pytest.raises(UserError, match="gives no number for iteration 0, but must be a function"):
        recycle.TrainOptions(schedule=schedule)
