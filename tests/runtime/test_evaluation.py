"""Evaluation between steps: the same number whoever is dead or dies, early stop and time limit."""

import os
import signal
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import recycle
from recycle.core.errors import DataFailed, DatasetTooSmall, UserError
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.core.events.op_columns import OPTIMIZER
from recycle.core.events.record import Evaluated, OpRan, Spell, Stepped, name_of
from recycle.core.events.record_file import RECORD, read_record
from recycle.planner.live_planner import Planner
from recycle.runtime.options import CheckpointOptions, EvaluationOptions, FailureOptions, TrainOptions
from tests.runtime.jobs import LEASE_S, WIDTH, adamw, loss, make_stages
from tests.runtime.recovery_runs import ALL, SYNCHRONOUS, problem

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(240)
SHAPE, SAMPLES, STEPS, EVERY = (2, 2, 3), 2, 6, 2


class Curves:
    """Samples made from their number. With a `flag`, the first process that asks for sample 8 kills itself."""

    def __init__(self, seed, num_samples, flag=None):
        self.seed, self.num_samples, self.flag = seed, num_samples, flag

    def __len__(self):
        return self.num_samples

    def __getitem__(self, number):
        if self.flag is not None and number == 8:
            try:
                Path(self.flag).touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        given = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1000 * self.seed + number))
        return given, given.roll(1, -1).tanh()


def train(
    fail="",
    lines=(),
    techniques=ALL,
    evaluation=None,
    out=None,
    resume=False,
    steps=STEPS,
    stages=None,
    callbacks=(),
    **options,
):
    wanted = problem(SHAPE, techniques)
    script = Script.of([Injection.parse(Action(line.split()[0]), line.split()[1]) for line in lines], wanted.shape, steps)
    options = TrainOptions(
        5,
        True,
        evaluation=EvaluationOptions(Curves(2, 19), EVERY) if evaluation is None else evaluation,
        checkpoint=CheckpointOptions(3, resume=resume),
        failures=FailureOptions(Planner(wanted), script, lease_s=LEASE_S, restarts=0),
        **options,
    )
    plan = recycle.solve(recycle.problem(*SHAPE, fail=fail, costs=(10, 13, 9), comm=1, techniques=techniques), "greedy")
    stages = stages or make_stages(SHAPE[1], dropout=0.1)
    return recycle.train(
        plan,
        stages,
        Curves(1, 64),
        loss,
        adamw,
        steps=steps,
        samples=SAMPLES,
        out=out,
        options=options,
        callbacks=callbacks,
    )


class Streamed:
    """The samples of `Curves`, without numbers. With a `log`, it has a line for every sample that a process reads."""

    def __init__(self, seed, num_samples, log=None):
        self.curves, self.log = Curves(seed, num_samples), log

    def __iter__(self):
        for number in range(len(self.curves)):
            if self.log is not None:
                with open(self.log, "a", encoding="utf-8") as log:
                    log.write(f"{os.getpid()} {number}\n")
            yield self.curves[number]


@cache
def undisturbed():
    return {each.num_steps: each.loss for each in train().evaluations}


def mean_loss(stages, data):
    """The mean loss by a plain loop over whole batches, in the order of the data."""
    model = torch.nn.Sequential(*stages).eval()
    losses = []
    with torch.no_grad():
        for first in range(0, len(data) // SAMPLES * SAMPLES, SAMPLES):
            pairs = [data[number] for number in range(first, first + SAMPLES)]
            losses.append(loss(model(torch.stack([x for x, _ in pairs])), torch.stack([y for _, y in pairs])).item())
    return sum(losses) / len(losses)


def test_it_is_the_number_of_a_plain_loop_over_the_saved_weights(tmp_path):
    trained = train(out=tmp_path)
    assert [each.num_steps for each in trained.evaluations] == [2, 4, 6]
    stages = make_stages(SHAPE[1])
    assert recycle.load(stages, tmp_path) == STEPS
    assert trained.evaluations[-1].loss == pytest.approx(mean_loss(stages, Curves(2, 19)), rel=1e-6)
    assert trained.evaluations[-1].num_microbatches == 9  # the last sample fills no micro-batch
    events = list(read_record(tmp_path / RECORD))
    order = [(name_of(event), event.num_steps if isinstance(event, Evaluated) else event.iteration + 1) for event in events
             if isinstance(event, Evaluated | Stepped)]  # fmt: skip
    steps = [("step", number) for number in range(1, 7)]
    assert order == [*steps[:2], ("evaluation", 2), *steps[2:4], ("evaluation", 4), *steps[4:], ("evaluation", 6)]
    assert sum(isinstance(event, Spell) and event.cause == "evaluation" for event in events) == 3


@pytest.mark.parametrize("is_lean", [True, False])
def test_the_second_computation_of_a_lean_step_is_in_the_record(is_lean, tmp_path):
    trained = train(out=tmp_path, lean_steps=is_lean)
    assert trained.weights_sha256 == train().weights_sha256
    ran = (event for event in read_record(tmp_path / RECORD) if isinstance(event, OpRan) and event.op == OPTIMIZER)
    counts = Counter((event.worker, event.iteration) for event in ran)
    # A step is settled in the iteration after it; before an evaluation and at the end it is settled in its own.
    expected = {0: 1, 1: 3, 2: 1, 3: 3, 4: 1, 5: 3} if is_lean else dict.fromkeys(range(STEPS), 1)
    workers = [f"W{pipeline}_{stage}" for pipeline in range(2) for stage in range(2)]
    assert counts == {(worker, iteration): expected[iteration] for worker in workers for iteration in expected}


def test_evaluations_change_nothing_in_the_training(tmp_path):
    assert train().weights_sha256 == train(evaluation=EvaluationOptions()).weights_sha256


@pytest.mark.parametrize(
    ("fail", "lines", "techniques"),
    [
        ("W1_0", (), ALL),
        ("W0_1,W1_0", (), ALL),
        ("", (), SYNCHRONOUS),
        ("", ("kill W1_1@3", "rejoin W1_1@4"), ALL),
        ("", ("kill W0_1@2", "kill coordinator@4", "kill W1_0@5"), ALL),
    ],
)
def test_it_is_the_same_number_whoever_is_dead(fail, lines, techniques):
    trained = train(fail, lines, techniques)
    assert {each.num_steps: each.loss for each in trained.evaluations} == undisturbed()


@pytest.mark.parametrize(("fail", "lines"), [("", ()), ("W1_0", ()), ("", ("kill W0_1@2", "kill coordinator@4", "kill W1_0@5"))])
def test_a_stream_gives_the_number_of_its_first_samples_in_every_evaluation(fail, lines, tmp_path):
    log = tmp_path / "log"
    trained = train(fail, lines, evaluation=EvaluationOptions(Streamed(2, 30, log), EVERY, samples=19))
    assert {each.num_steps: each.loss for each in trained.evaluations} == undisturbed()
    assert trained.evaluations[-1].num_microbatches == 9
    if not lines:
        # The job itself reads the first micro-batch; workers read once in every evaluation, to the last whole micro-batch.
        counts = Counter(map(tuple, (line.split() for line in log.read_text(encoding="utf-8").splitlines())))
        assert {int(number) for _, number in counts} == set(range(18))
        assert {count for (_, number), count in counts.items() if int(number) >= SAMPLES} == {STEPS // EVERY}


def test_the_first_samples_of_a_dataset_are_evaluated():
    trained = train(evaluation=EvaluationOptions(Curves(2, 40), EVERY, samples=19))
    assert {each.num_steps: each.loss for each in trained.evaluations} == undisturbed()


def test_a_stream_that_ends_within_an_evaluation_is_told_in_a_sentence():
    with pytest.raises(DataFailed, match="the evaluation stream ended after 9 samples, but an evaluation is to read 19: give"):
        train(evaluation=EvaluationOptions(Streamed(2, 9), EVERY, samples=19))


@pytest.mark.parametrize("techniques", [ALL, SYNCHRONOUS])
def test_an_evaluation_in_which_a_worker_dies_is_done_again(techniques, tmp_path):
    trained = train(evaluation=EvaluationOptions(Curves(2, 19, str(tmp_path / "flag")), EVERY), techniques=techniques)
    assert len(trained.recoveries) == 1
    assert trained.recoveries[0].iteration == 2
    assert {each.num_steps: each.loss for each in trained.evaluations} == undisturbed()


def test_a_resumed_run_has_every_evaluation_once(tmp_path):
    first = train(out=tmp_path, steps=3)
    assert [each.num_steps for each in first.evaluations] == [2, 3]
    trained = train(out=tmp_path, resume=True)
    assert {each.num_steps: each.loss for each in trained.evaluations if each.num_steps != 3} == undisturbed()
    evaluated = [event.num_steps for event in read_record(tmp_path / RECORD) if isinstance(event, Evaluated)]
    assert evaluated == [2, 3, 4, 6]


def test_a_run_stops_when_its_evaluations_become_no_better(tmp_path):
    # The data are noise: on other noise the loss does not fall for long.
    class Seen(recycle.Callback):
        def __init__(self):
            self.evaluated = []

        def on_evaluate(self, evaluation):
            self.evaluated.append(evaluation.num_steps)

    seen = Seen()
    data = Noise(3, 12)
    trained = train(evaluation=EvaluationOptions(data, 1, patience=2), out=tmp_path, steps=200, callbacks=[seen])
    losses = [each.loss for each in trained.evaluations]
    assert trained.num_steps < 200
    assert trained.stopped_because == "the evaluation loss has not fallen in 2 evaluations"
    assert trained.saved_steps == trained.num_steps
    stop = next(number for number in range(2, len(losses)) if min(losses[number - 1 : number + 1]) >= min(losses[: number - 1]))
    assert stop + 1 <= trained.num_steps <= stop + 6  # it ends at an iteration boundary soon after
    assert seen.evaluated == [each.num_steps for each in trained.evaluations]


class Noise(Curves):
    def __getitem__(self, number):
        given, _ = super().__getitem__(number)
        return given, torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(7000 + number)) * 3


def test_a_run_ends_with_a_checkpoint_when_its_time_is_over(tmp_path):
    trained = train(out=tmp_path, steps=100_000, time_limit_s=6.0, evaluation=EvaluationOptions())
    assert 0 < trained.num_steps < 100_000
    assert trained.stopped_because == "the time limit of 6 s is reached"
    assert trained.saved_steps == trained.num_steps == len(trained.losses)


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (lambda: EvaluationOptions(None, 2), UserError, "nothing to evaluate"),
        (lambda: EvaluationOptions(Curves(1, 4), -1), UserError, "steps between evaluations is -1"),
        (lambda: EvaluationOptions(Curves(1, 1), 2), DatasetTooSmall, "1 samples, but a micro-batch has 2"),
        (lambda: EvaluationOptions(3, 2), UserError, "must be map-style"),
        (lambda: EvaluationOptions(Curves(1, 19), samples=-1), UserError, "number of samples of an evaluation is -1"),
        (lambda: EvaluationOptions(Curves(1, 19), samples=20), DatasetTooSmall, "to read 20 samples, but .* have 19"),
        (lambda: EvaluationOptions(Streamed(2, 19)), UserError, r"give EvaluationOptions\(samples=...\)"),
        (lambda: EvaluationOptions(Streamed(2, 19), samples=1), DatasetTooSmall, "1 samples, but a micro-batch has 2"),
        (lambda: EvaluationOptions(iter([]), samples=4), UserError, "can be read once only"),
        (lambda: EvaluationOptions(DataLoader(Curves(2, 19), 2), samples=4), UserError, "are a loader, .*: give its dataset"),
        (lambda: EvaluationOptions([(torch.ones(4), torch.ones(4))] * 2, 2), UserError, "the inputs of the evaluation data are"),
    ],
)
def test_evaluation_data_that_cannot_be_used_are_refused(make, kind, says):
    with pytest.raises(kind, match=says):
        train(evaluation=make())
