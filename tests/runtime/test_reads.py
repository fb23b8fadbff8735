"""Who reads which samples, and how often: workers of the first and the last stage, each sample once in a step."""

import os
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

import recycle
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.core.events.record import Placed, Recovered

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(180)
SHAPE, SAMPLES, STEPS, WIDTH = recycle.Shape(2, 3, 3), 2, 5, 4
PER_STEP = SHAPE.num_chains * SAMPLES
FIRST, LAST = 0, SHAPE.num_stages - 1


class Logged:
    """A dataset that writes down what is made of it, and by which process: a worker, or a child of one."""

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return STEPS * PER_STEP

    def __getitem__(self, number):
        self.log("whole", number)
        return self.make_inputs(number), self.make_inputs(number).sin()

    def make_inputs(self, number):
        return torch.full((WIDTH,), number / 100)

    def log(self, what, number):
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()} {os.getppid()} {what} {number}\n")


class InHalves(Logged):
    """One that can make inputs and targets alone."""

    def inputs(self, number):
        self.log("inputs", number)
        return self.make_inputs(number)

    def targets(self, number):
        self.log("targets", number)
        return self.make_inputs(number).sin()


class OtherHalves(InHalves):
    def targets(self, number):
        return self.make_inputs(number).cos()


def train(dataset, *kills, loader_processes=0, events=None):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    script = Script.of([Injection.parse(Action.KILL, kill) for kill in kills], SHAPE, STEPS)
    failures = recycle.FailureOptions(script=script, restarts=0)
    data = recycle.DataOptions(loader_processes, order="sequential")
    options = recycle.TrainOptions(quiet=True, is_exact=True, failures=failures, data=data)
    how = nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1)
    watch = [].append if events is None else events.append
    return recycle.train(SHAPE, model, dataset, *how, steps=STEPS, samples=SAMPLES, out=None, options=options, watch=watch)


def reads_by_stage(path, *kills, kind=Logged, **how):
    """How often each stage made each sample, by stage, what was made, and number; and the recoveries of the run."""
    events = []
    trained = train(kind(path), *kills, events=events, **how)
    assert len(trained.losses) == STEPS
    stages = {event.pid: recycle.Worker.parse(event.node).stage for event in events if isinstance(event, Placed)}
    assert sorted(set(stages.values())) == [0, 1, 2]
    counts = Counter()
    for line in path.read_text().splitlines():
        pid, parent, what, number = line.split()
        if int(pid) != os.getpid():  # this one only tries the data before training begins
            counts[stages.get(int(pid), stages.get(int(parent))), what, int(number)] += 1
    return counts, [event for event in events if isinstance(event, Recovered)]


def once(*reads):
    return {(stage, what, number): 1 for stage, what in reads for number in range(STEPS * PER_STEP)}


@pytest.mark.parametrize("loader_processes", [0, 1])
def test_the_first_and_the_last_stage_make_each_sample_once_and_no_other_stage_any(tmp_path, loader_processes):
    counts, _ = reads_by_stage(tmp_path / "log", loader_processes=loader_processes)
    assert counts == once((FIRST, "whole"), (LAST, "whole"))


@pytest.mark.parametrize("loader_processes", [0, 1])
def test_the_first_stage_makes_no_targets_and_the_last_no_inputs_if_they_can_be_made_alone(tmp_path, loader_processes):
    counts, _ = reads_by_stage(tmp_path / "log", kind=InHalves, loader_processes=loader_processes)
    assert counts == once((FIRST, "inputs"), (LAST, "targets"))


@pytest.mark.parametrize("killed", ["W1_0@3:last", "W0_2@3:first"])
def test_after_a_failure_only_samples_of_steps_that_are_run_again_are_made_again(tmp_path, killed):
    counts, recoveries = reads_by_stage(tmp_path / "log", killed)
    assert {(stage, number) for stage, _, number in counts} == {
        (stage, number) for stage, _, number in once((FIRST, ""), (LAST, ""))
    }
    assert max(counts.values()) <= 1 + len(recoveries)
    (recovery,) = recoveries
    again = {number // PER_STEP for (_, _, number), count in counts.items() if count > 1}
    assert again <= {recovery.iteration, recovery.iteration + 1}, "stages are one iteration apart at most"
    num_again = sum(count - 1 for count in counts.values())
    assert num_again <= recovery.redone_ops * SAMPLES + PER_STEP, "a dead worker does not report what it ran"


def test_halves_change_no_weight(tmp_path):
    whole, halves = train(Logged(tmp_path / "log")), train(InHalves(tmp_path / "log"), "W1_0@3:last")
    assert halves.weights_sha256 == whole.weights_sha256


def test_halves_that_differ_from_the_whole_sample_are_refused(tmp_path):
    with pytest.raises(
        recycle.UserError, match=r"^the method targets of the dataset makes something else than dataset\[number\]"
    ):
        train(OtherHalves(tmp_path / "log"))
