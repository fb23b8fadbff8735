"""Training in float16: the scale of the loss is that of `torch.amp.GradScaler`, at all stages alike, whoever dies."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import recycle
from recycle.core.errors import ForeignRun, UserError
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.core.events.record import Recovered, Stepped
from recycle.core.events.record_file import RECORD, read_record
from recycle.planner.live_planner import Planner
from recycle.runtime.job import Job
from recycle.runtime.launch.local_launcher import launch
from recycle.runtime.options import CheckpointOptions, FailureOptions, TrainOptions
from tests.runtime.jobs import BATCH, LEASE_S, WIDTH, Numbers, loss, sgd, small_stages
from tests.runtime.recovery_runs import ALL, SYNCHRONOUS, problem

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(240)
SHAPE, STEPS = (2, 2, 3), 14
# Large enough that the first steps overflow, and an interval so short that the scale grows into the next overflow.
SCALE = recycle.LossScale(initial=2.0**26, interval=3)


class Bare(nn.Module):
    """A stage without parameters, which has no optimizer either."""

    def forward(self, x):
        return x * 2.0

    def split_into_layers(self):
        return [self]


def with_a_bare_stage(num_stages):
    return [*small_stages(num_stages - 1), Bare()]


def scaled_by_torch(updates, options):
    """The scales of torch's own scaler, before each of the steps whose gradients overflow or not, and after all."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", options.initial, options.growth, options.backoff, options.interval)
    found = []
    for overflows in updates:
        scaler.scale((weight * (torch.inf if overflows else 1.0)).sum()).backward()
        found.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [*found, scaler.get_scale()]


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.sampled_from([1.0, 512.0, 2.0**40]))
def test_the_scale_changes_as_in_torch(updates, interval, initial):
    options = recycle.LossScale(initial, interval=interval)
    held = [(options.initial, 0)]
    for overflows in updates:
        held.append(options.after(*held[-1], overflows))
    assert [scale for scale, _ in held] == scaled_by_torch([*updates, False], options)[:-1]


def test_a_scale_stays_a_number_that_can_be_inverted():
    options, low, high = recycle.LossScale(interval=1), (1.0, 0), (1.0, 0)
    for _ in range(400):
        low, high = options.after(*low, True), options.after(*high, False)
    assert 0.0 < low[0] < 1e-37 < 1e37 < high[0] < 1e39


@cache
def in_plain_torch(make=small_stages):
    """The losses and the scales of the whole model in one process, by the loop of torch's documentation."""
    model, samples = nn.Sequential(*make(SHAPE[1])), Numbers()
    optimizer, losses, scales = sgd(model.parameters()), [], []
    scaler = torch.amp.GradScaler("cpu", SCALE.initial, growth_interval=SCALE.interval)
    pairs = [(pipeline, index) for pipeline in range(SHAPE[0]) for index in range(SHAPE[2])]
    for step in range(STEPS):
        found = []
        for pair in pairs:
            x, y = samples.get(step, *pair)
            with torch.autocast("cpu", torch.float16):
                found.append(loss(model(x), y))
            scaler.scale(found[-1]).backward()
        scaler.unscale_(optimizer)
        for parameter in model.parameters():
            parameter.grad /= len(pairs)
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(torch.stack(found).mean().item())
    return losses, scales


def job(*lines, techniques=ALL, steps=STEPS, out=None, resume=False, make=small_stages, scale=SCALE, shape=SHAPE, is_exact=True):
    wanted = problem(shape, techniques)
    script = Script.of([Injection.parse(Action(line.split()[0]), line.split()[1]) for line in lines], wanted.shape, steps)
    options = TrainOptions(
        5,
        is_exact,
        autocast=torch.float16,
        loss_scale=scale,
        checkpoint=CheckpointOptions(4, resume=resume),
        failures=FailureOptions(Planner(wanted), script, lease_s=LEASE_S, restarts=0),
    )
    return Job(recycle.solve(wanted, "greedy"), make(shape[1]), Numbers(), loss, sgd, steps, out=out, options=options)


def run(*lines, **options):
    """The losses, scales, scales of steps that were skipped, weights and recoveries of a run.

    On a busy machine a worker may come back only after its last peer was killed; the run then starts again from its first step.
    So the last report of each step counts.
    """
    events = []
    trained = launch(job(*lines, **options), events.append)
    steps = list({event.iteration: event for event in events if isinstance(event, Stepped)}.values())
    skipped = [step.loss_scale for step in steps if step.scale is None]
    recoveries = sum(isinstance(event, Recovered) for event in events)
    return trained.losses, [step.loss_scale for step in steps], skipped, trained.weights_sha256, recoveries


@cache
def undisturbed(make=small_stages):
    return run(make=make)


@pytest.mark.parametrize("make", [small_stages, with_a_bare_stage])
def test_losses_and_scales_are_those_of_plain_torch(make):
    losses, scales, skipped, _, _ = undisturbed(make)
    plain_losses, plain_scales = in_plain_torch(make)
    assert scales == plain_scales
    assert losses == pytest.approx(plain_losses, rel=2e-3)
    assert len(skipped) >= 3  # at the start, and after the scale has grown
    assert max(scales[scales.index(min(scales)) :]) > min(scales)


@pytest.mark.parametrize(("techniques", "is_exact"), [(ALL, False), (SYNCHRONOUS, True), (SYNCHRONOUS, False)])
def test_both_optimizers_and_both_sums_give_the_same_scales(techniques, is_exact):
    losses, scales, _, weights, _ = run(techniques=techniques, is_exact=is_exact)
    assert scales == in_plain_torch()[1]
    assert losses == pytest.approx(undisturbed()[0], rel=1e-4)
    assert not is_exact or weights == undisturbed()[3]


@pytest.mark.parametrize(
    "lines",
    [
        # In steps that are skipped, in the votes on them, and after the scale has grown; one comes back, and copies a peer.
        ("kill W0_1@2", "kill W1_0@3:step"),
        ("kill W1_1@4:reduce", "rejoin W1_1@8", "kill W0_1@10"),
    ],
)
def test_scales_and_weights_are_the_same_whoever_dies(lines):
    losses, scales, skipped, weights, recoveries = run(*lines)
    assert (losses, scales, skipped, weights) == undisturbed()[:4]
    assert recoveries >= 2


@pytest.mark.parametrize("make", [small_stages, with_a_bare_stage])
def test_a_resumed_run_goes_on_with_the_scale_of_its_checkpoint(tmp_path, make):
    losses, scales, _, weights, _ = undisturbed(make)
    first = run(steps=7, out=tmp_path, make=make)
    assert first[1] == scales[:7]
    assert scales[7] not in (SCALE.initial, scales[0])
    other = run(out=tmp_path, resume=True, make=make)
    assert other[1] == scales[7:]
    assert (other[0], other[3]) == (losses, weights)
    record = read_record(tmp_path / RECORD)
    assert [event.loss_scale for event in record if isinstance(event, Stepped)] == scales


def test_a_run_with_another_rule_for_its_scale_is_another_run(tmp_path):
    run(steps=4, out=tmp_path)
    with pytest.raises(ForeignRun, match=r"its loss_scale.* is .*; resume with the same job"):
        run(steps=8, out=tmp_path, resume=True, scale=replace(SCALE, interval=4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"initial": 0.0}, r"the initial scale of the loss scale is 0.0, but it must be a number from"),
        ({"initial": torch.nan}, "the initial scale of the loss scale is nan"),
        ({"growth": 0.5}, "the growth of the loss scale is 0.5, but it must be a number from 1 to"),
        ({"backoff": 2}, "the backoff of the loss scale is 2"),
        ({"interval": 0}, "the interval of the loss scale is 0, but it must be a whole number of at least 1"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(options, words):
    with pytest.raises(UserError, match=words):
        recycle.LossScale(**options)


def test_float16_without_a_scale_is_refused():
    with pytest.raises(UserError, match=r"loss_scale is None, but it must be a recycle.LossScale"):
        TrainOptions(autocast=torch.float16, loss_scale=None)
    with pytest.raises(UserError, match="gradients cannot be summed in float16"):
        TrainOptions(sum_dtype=torch.float16)
    data = [(torch.ones(BATCH, WIDTH), torch.ones(BATCH, WIDTH))] * 64
    half = [stage.half() for stage in small_stages(2)]
    with pytest.raises(
        UserError, match=r"parameter 0.weight of stage 0 is torch.float16, .*TrainOptions\(autocast=torch.float16\)"
    ):
        recycle.train((2, 2, 2), half, data, loss, sgd, steps=1, out=None)
