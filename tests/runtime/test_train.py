"""`recycle.train`, as one calls it: any model in stages, any data; what plain torch computes, or a refusal of its own kind."""

import math
from functools import partial
from multiprocessing import active_children, parent_process
from threading import Lock

import pytest
import torch
from torch import nn

import recycle
from recycle.core.errors import (
    DatasetTooSmall,
    ForeignPlan,
    ForeignRun,
    LossNotScalar,
    NoCheckpoint,
    Uncuttable,
    Unsendable,
    UserError,
    WorkerFailed,
)
from recycle.core.events.record import Spell, Stepped
from recycle.core.events.record_file import read_record
from recycle.runtime.checkpoint.tensor_file import load_tensors
from recycle.runtime.compute.learning_rate import NAMES, WarmUpThen
from recycle.runtime.compute.microbatches import MicroBatches
from recycle.runtime.options import CheckpointOptions, FailureOptions
from tests.runtime.jobs import adamw, greedy_plan, loss, sgd

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(180)
WIDTH = 8
RESUME = CheckpointOptions(resume=True)
# A planner takes a second to load in every run.
NO_RECOVERY = FailureOptions(recovers=False)


class Curves:
    """Points and what becomes of them, from one tensor each, as data sets in memory are."""

    def __init__(self, num_samples=40):
        generator = torch.Generator().manual_seed(3)
        self.points = torch.randn(num_samples, WIDTH, generator=generator)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, number):
        return self.points[number], self.points[number].roll(1).sin()


def make_model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))


def make_stages():
    return recycle.cut(make_model(), [2])


def plan(fail="", shape=(2, 2, 3), techniques="adaptive,decoupled,staggered"):
    return greedy_plan(shape, fail, techniques)


def train(
    stages=None,
    dataset=None,
    loss=loss,
    optimizer=sgd,
    by=None,
    steps=2,
    samples=2,
    out=None,
    watch=lambda event: None,
    **options,
):
    """Train two small stages for two steps, with other arguments and options as a test gives them."""
    stages, dataset = make_stages() if stages is None else stages, dataset or Curves()
    arguments = {"steps": steps, "samples": samples, "out": out, "watch": watch}
    try:
        options = recycle.TrainOptions(**{"seed": 4, "failures": NO_RECOVERY, "quiet": True, **options})
        return recycle.train(by or plan(), stages, dataset, loss, optimizer, options=options, **arguments)
    finally:
        assert not active_children()


# What it computes.


def in_plain_torch(steps, max_norm, schedule):
    """The loss of each step and the model, by the loop that everybody writes."""
    model, shape, losses = make_model(), plan().problem.shape, []
    batches, optimizer = MicroBatches(Curves(), shape, 2, 4), sgd(model.parameters())
    rate = optimizer.param_groups[0]["lr"]
    addresses = [(pipeline, index) for pipeline in range(shape.num_pipelines) for index in range(shape.num_microbatches)]
    for step in range(steps):
        pairs = [batches.get(step, *address) for address in addresses]
        mean = torch.stack([loss(model(given), targets) for given, targets in pairs]).mean()
        optimizer.zero_grad()
        mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.param_groups[0]["lr"] = rate * schedule(step)
        optimizer.step()
        losses.append(mean.item())
    return losses, model


@pytest.mark.parametrize(("fail", "is_exact"), [("", False), ("W1_0", False), ("W0_1", True)])
def test_it_computes_what_plain_torch_computes(fail, is_exact, tmp_path):
    schedule = WarmUpThen("cosine", 1, 4)
    made = train(by=plan(fail), steps=4, max_norm=0.3, schedule=schedule, is_exact=is_exact, out=tmp_path)
    losses, model = in_plain_torch(4, 0.3, schedule)
    assert list(made.losses) == pytest.approx(losses, rel=1e-5)
    for number, stage in enumerate(recycle.cut(model, [2])):
        found, _ = load_tensors(tmp_path / "checkpoints" / "step-00000004" / f"stage-{number}.safetensors")
        for name, weight in stage.state_dict().items():
            assert torch.allclose(found[name], weight, rtol=1e-4, atol=1e-6), name


def test_the_callers_model_and_random_numbers_are_left_as_they_were():
    stages = make_stages()
    before = [value.clone() for stage in stages for value in stage.state_dict().values()]
    torch.manual_seed(9)
    state = torch.get_rng_state()
    first, second = train(stages), train(stages)
    assert first.weights_sha256 == second.weights_sha256
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(*pair) for pair in zip(before, [v for s in stages for v in s.state_dict().values()], strict=True))


def test_a_stage_without_parameters_passes_on_what_it_makes():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    assert len(train(recycle.cut(model, [1])).losses) == 2


def test_data_in_many_small_tensors_reaches_the_workers():
    points = [(torch.ones(WIDTH) * number, torch.zeros(WIDTH)) for number in range(300)]
    assert len(train(dataset=points).losses) == 2


def test_watch_gets_the_record_event_by_event(tmp_path):
    events = []
    made = train(out=tmp_path, watch=events.append, checkpoint=CheckpointOptions(every=1))
    assert events == list(read_record(tmp_path / "record.jsonl"))[1:]  # after the line that says what began
    assert [event.loss for event in events if isinstance(event, Stepped)] == list(made.losses)


def test_it_goes_on_bit_for_bit_by_another_plan(tmp_path):
    straight = train(is_exact=True, steps=4, optimizer=adamw)
    train(is_exact=True, steps=2, optimizer=adamw, out=tmp_path)
    made = train(is_exact=True, steps=4, optimizer=adamw, out=tmp_path, checkpoint=RESUME, by=plan("W1_1", techniques="adaptive"))
    assert made.weights_sha256 == straight.weights_sha256
    assert made.losses == straight.losses
    spells = [event for event in read_record(tmp_path / "record.jsonl") if isinstance(event, Spell)]
    assert sum(spell.samples for spell in spells) == 4 * 12


# What it refuses.


class TwoThings(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


class WholeNumbers(nn.Linear):
    def forward(self, x):
        return super().forward(x).long()


class Raises(nn.Linear):
    """Computes well for three iterations of three micro-batches, in a worker."""

    num_runs = 0

    def forward(self, x):
        self.num_runs += parent_process() is not None
        if self.num_runs > 9:
            raise RuntimeError("the third digit is missing")
        return super().forward(x)


class Counting(nn.Module):
    """A stage that a user would call normalising."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def forward(self, x):
        return self.inner(x)


def each_by_itself(made, targets):
    return (made - targets).square()


def in_a_list(made, targets):
    return [loss(made, targets)]


def locked(lock, made, targets):
    return loss(made, targets)


def as_a_number(made, targets):
    return loss(made, targets).item()


def linear(kind=nn.Linear):
    return kind(WIDTH, WIDTH)


# what is given, the kind of error, its exit code, what the sentence says
WRONG = {
    "a stage of two things": (
        {"stages": [linear(TwoThings), linear()]},
        Unsendable,
        16,
        "stage 1 cannot take what stage 0 returned, a tuple of 2",
    ),
    "a stage of whole numbers": ({"stages": [linear(WholeNumbers), linear()]}, Unsendable, 16, r"stage 0 returned torch.int64"),
    "a loss for each": ({"loss": each_by_itself}, LossNotScalar, 17, r"the loss has the shape \(2, 8\)"),
    "a list of losses": ({"loss": in_a_list}, LossNotScalar, 17, "the loss is a list"),
    "a loss without a graph": ({"loss": as_a_number}, LossNotScalar, 17, "the loss is a float"),
    "too little data": ({"dataset": Curves(11)}, DatasetTooSmall, 11, "one step needs 12 samples .* the dataset has 11"),
    "running statistics": ({"stages": [Counting(), linear()]}, UserError, 2, r"stage 0 .*inner\.1.*BatchNorm"),
    "a loss with a lock": ({"loss": partial(locked, Lock())}, UserError, 2, "cannot be sent to a worker process: .*lock"),
    "one stage for two": ({"stages": [linear()]}, ForeignPlan, 12, "the plan has 2 stages, but the model is cut into 1"),
    "nowhere to go on": ({"checkpoint": RESUME}, UserError, 2, "name it with out"),
    "no samples": ({"samples": 0}, UserError, 2, "a micro-batch has 0 samples"),
    "no steps": ({"steps": 0}, UserError, 2, "steps"),
    "fewer steps than none": ({"steps": -3}, UserError, 2, "steps"),
    "a negative norm": ({"max_norm": -1.0}, UserError, 2, "max_norm"),
    "a norm that is no number": ({"max_norm": math.nan}, UserError, 2, "max_norm"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_trained_is_refused_by_its_own_kind_of_error(what):
    given, kind, code, sentence = WRONG[what]
    with pytest.raises(kind, match=sentence) as refused:
        train(**given)
    assert type(refused.value) is kind
    assert refused.value.exit_code == code
    assert "\n" not in str(refused.value)


def test_a_stage_that_raises_in_a_worker_is_reported_with_the_name_of_the_worker_and_the_exception():
    with pytest.raises(WorkerFailed, match=r"W0_1 cannot go on:(?s:.*)RuntimeError: the third digit is missing") as failed:
        train([linear(), linear(Raises)], by=plan("W1_1"), steps=9)
    assert failed.value.exit_code == 20


def test_the_worker_that_failed_is_named_not_those_that_only_missed_it():
    # Who hears late, because it writes to a slow disk, finds the last words of all: the others lost the one that raised.
    def watch(event):
        if isinstance(event, Stepped):
            for worker in active_children():
                worker.join(60)

    made = plan("W1_2", shape=(2, 3, 2))
    with pytest.raises(WorkerFailed, match=r"W0_2 cannot go on:(?s:.*)the third digit is missing"):
        train([linear(), linear(), linear(Raises)], by=made, steps=99, watch=watch)


def test_a_run_of_another_job_is_not_gone_on_with(tmp_path):
    train(out=tmp_path)
    with pytest.raises(ForeignRun, match="its seed is 4, but this job's is 5"):
        train(out=tmp_path, checkpoint=RESUME, seed=5)
    with pytest.raises(ForeignRun, match="model"):
        train([linear(), linear()], out=tmp_path, checkpoint=RESUME)
    with pytest.raises(ForeignRun, match="made with SGD, but this job steps with AdamW"):
        train(out=tmp_path, checkpoint=RESUME, optimizer=adamw, steps=3)
    with pytest.raises(NoCheckpoint, match="there is no whole checkpoint"):
        train(out=tmp_path / "nowhere", checkpoint=RESUME)


@pytest.mark.parametrize("cuts", [[0], [4], [2, 2], [3, 1], [9], [-1]])
def test_cuts_that_leave_a_stage_empty_are_refused(cuts):
    with pytest.raises(Uncuttable, match="do not leave a layer in every stage of a model of 4") as refused:
        recycle.cut(make_model(), cuts)
    assert refused.value.exit_code == 10


def test_only_a_sequence_can_be_cut():
    with pytest.raises(Uncuttable, match="a Linear cannot be cut"):
        recycle.cut(linear(), [1])
    assert [len(stage) for stage in recycle.cut(make_model(), [1, 3])] == [1, 2, 1]


# Schedules.


def test_a_schedule_rises_in_the_warm_up_and_falls_to_nothing_at_the_end():
    rises = [WarmUpThen("constant", 4, 10)(iteration) for iteration in range(6)]
    assert rises == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert [WarmUpThen("linear", 0, 4)(iteration) for iteration in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert [WarmUpThen("cosine", 2, 6)(iteration) for iteration in (2, 4, 6)] == pytest.approx([1.0, 0.5, 0.0])


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_stays_within_its_bounds_beyond_the_end_too(name):
    for warm_up in (0, 1, 5):
        assert all(0.0 <= WarmUpThen(name, warm_up, 5)(iteration) <= 1.0 for iteration in range(20))
