"""A worker's footing: whatever was guessed, taken back, settled late or done again, its weights are those of plain torch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from recycle.control.decide.agreement import ABSENT
from recycle.control.decide.messages import Ballot, ProgressReport
from recycle.core.cluster import Shape
from recycle.runtime.compute.optimizer_step import StepVerdict
from recycle.runtime.compute.tied_parameters import Tie
from recycle.runtime.execute.executor import Span
from recycle.runtime.options import TrainOptions
from recycle.runtime.worker.epoch_setup import make_stage_state
from recycle.runtime.worker.worker_spec import CopiedStages, WorkerSpec
from tests.runtime.checkpoint.saved_stages import held
from tests.runtime.jobs import Numbers, adamw, loss, sgd

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(120)
SHAPE = Shape(1, 2, 2)
LOSSES = (0.5, 0.25)
# What the gradients of this stage are below, so that the other stage's alone decide whether a step is clipped.
MAX_NORM = 50.0
FINE, LARGE, INFINITE = 0.0, 1e4, math.inf
"""The other stage's sum of squares: nothing is clipped, something is, or the step is skipped."""


def nesterov(parameters):
    """An optimizer that changes the gradients that it is given, as torch's own does here."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, foreach=True)


OPTIMIZERS = [adamw, sgd, nesterov]


def falling(iteration):
    return 1.0 / (1 + iteration)


def make_modules():
    torch.manual_seed(7)
    return [nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)) for _ in range(SHAPE.num_stages)]


def begin(optimizer, is_exact=False, stage=1, ties=()):
    """The footing of a worker of one of two stages, by default the last."""
    kit = WorkerSpec(
        shape=SHAPE,
        stages=CopiedStages(make_modules()),
        tensor_specs={},
        ties=ties,
        microbatches=Numbers(),
        loss=loss,
        make_optimizer=optimizer,
        num_steps=9,
        options=TrainOptions(is_exact=is_exact, max_norm=MAX_NORM, schedule=falling),
    )
    return make_stage_state(kit, stage)


def gradients(iteration, parameters):
    """What each of two micro-batches adds in an iteration: multiples of 1/256, of which a sum is the same in any arithmetic."""
    generator = torch.Generator().manual_seed(iteration)
    return [[torch.randint(-256, 256, of.shape, generator=generator) / 256 for of in parameters] for _ in range(2)]


def reduce(footing, iteration, spans=()):
    """Compute an iteration up to the gradient of all peers; return the ballot but for the other stage."""
    parameters = list(footing.stage.parameters())
    for contribution in gradients(iteration, parameters):
        footing.stage.sums.add(parameters, contribution)
    footing.hold(iteration, dict(enumerate(LOSSES)), spans)
    norm = footing.norm_squared()
    return lambda other: Ballot(iteration, (other, norm))


class Plain:
    """The same stage by torch alone, which waits for every verdict, and takes nothing back."""

    def __init__(self, optimizer, stage=1):
        self.module = make_modules()[stage]
        self.optimizer = optimizer(list(self.module.parameters()))
        self._rate = self.optimizer.param_groups[0]["lr"]

    def step(self, iteration, other=FINE):
        parameters = list(self.module.parameters())
        one, two = gradients(iteration, parameters)
        means = [(first + second) / 2 for first, second in zip(one, two, strict=True)]
        norm = math.sqrt(other + sum(float(mean.double().square().sum()) for mean in means))
        if not math.isfinite(norm):
            return self
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = mean if norm <= MAX_NORM else mean * (MAX_NORM / norm)
        self.optimizer.param_groups[0]["lr"] = self._rate * falling(iteration)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    def steps(self, *others):
        for iteration, other in enumerate(others):
            self.step(iteration, other)
        return self


def is_same(footing, plain):
    """Whether weights and optimizer are equal, bit for bit."""
    return held(footing.stage.module, footing.stepper.optimizer) == held(plain.module, plain.optimizer)


def nobody(*told):
    pass


class Reports(list):
    def __call__(self, iteration, losses, spans, verdict):
        self.append((iteration, dict(losses), list(spans), verdict))


# One step after the other.


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("is_exact", [False, True])
def test_a_guess_that_was_right_is_the_step_itself(optimizer, is_exact):
    footing = begin(optimizer, is_exact)
    for iteration in range(3):
        ballot = reduce(footing, iteration)
        footing.apply(1.0)
        assert footing.confirm(ballot(FINE), nobody)
    assert footing.num_steps == 3
    assert is_same(footing, Plain(optimizer).steps(FINE, FINE, FINE))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("other", [LARGE, INFINITE, math.nan])
def test_a_guess_that_was_wrong_is_as_if_it_had_waited(optimizer, is_exact, other):
    footing = begin(optimizer, is_exact)
    for iteration, found in enumerate((FINE, other, FINE)):
        ballot = reduce(footing, iteration)
        footing.apply(1.0)
        assert footing.confirm(ballot(found), nobody) == (found == FINE)
    assert is_same(footing, Plain(optimizer).steps(FINE, other, FINE))


steps = st.lists(
    st.tuples(st.sampled_from([1.0, "what is right", "nothing"]), st.sampled_from([FINE, LARGE, INFINITE])), max_size=5
)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=30, deadline=None)
@given(steps=steps)
def test_whatever_was_applied_before_the_verdict_was_heard_counts_for_nothing(optimizer, steps):
    footing, plain = begin(optimizer), Plain(optimizer)
    for iteration, (guess, other) in enumerate(steps):
        ballot = reduce(footing, iteration)(other)
        scale = footing.judge(ballot).scale
        if guess != "nothing":
            footing.apply(1.0 if guess == 1.0 else scale)
        assert footing.confirm(ballot, nobody) == (guess != "nothing" and (guess != 1.0 or scale == 1.0))
        assert is_same(footing, plain.step(iteration, other))
        assert footing.standing() == ProgressReport(iteration + 1, None, ballot)


def test_an_iteration_is_held_once_and_in_its_turn():
    footing = begin(adamw)
    with pytest.raises(AssertionError, match="iteration 1 is to be applied after 0 steps"):
        footing.hold(1, {}, ())
    reduce(footing, 0)
    with pytest.raises(AssertionError, match="still to be confirmed"):
        footing.hold(0, {}, ())
    with pytest.raises(AssertionError, match="a verdict on iteration 4, not 0"):
        footing.confirm(Ballot(4, (0.0, 1.0)), nobody)


def test_an_iteration_is_reported_once_when_it_cannot_be_taken_back_with_its_losses():
    footing, reports, spans = begin(sgd), Reports(), [Span("0F0@0", 1, 2)]
    reduce(footing, 0, spans)
    footing.apply(1.0)
    spans.append(Span("optimizer", 2, 3))
    assert reports == []
    footing.confirm(Ballot(0, (90.0**2, 90.0**2)), reports)
    norm = math.sqrt(2) * 90
    assert reports == [(0, dict(enumerate(LOSSES)), spans, StepVerdict(pytest.approx(norm), pytest.approx(MAX_NORM / norm)))]


def test_a_tied_parameter_counts_for_the_norm_of_its_first_stage_alone():
    tie = Tie(((0, "0.weight"), (1, "0.weight")))
    norms = []
    for stage, ties in ((0, ()), (0, [tie]), (1, ()), (1, [tie])):
        footing = begin(sgd, stage=stage, ties=ties)
        reduce(footing, 0)
        norms.append(footing.norm_squared())
    tied = gradients(0, list(make_modules()[1].parameters()))
    own = float(((tied[0][0] + tied[1][0]) / 2).double().square().sum())
    assert norms[0] == norms[1]
    assert norms[2] - norms[3] == pytest.approx(own, rel=1e-12)


# Where it stands.


def test_a_footing_without_a_step_stands_at_its_beginning():
    assert begin(adamw).standing() == ProgressReport(0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("is_applied", [False, True])
def test_who_holds_a_gradient_says_its_own_part_and_what_it_heard_last(optimizer, is_applied):
    footing = begin(optimizer)
    first = reduce(footing, 0)(FINE)
    footing.confirm(first, nobody)
    norm = reduce(footing, 1)(FINE).norms[1]
    if is_applied:
        footing.apply(1.0)
    assert footing.standing() == ProgressReport(1 + is_applied, Ballot(1, (ABSENT, norm)), first)
    assert footing.standing().num_reduced == 2


# Where all go on.


def stopped(optimizer, is_exact, is_held, is_applied):
    """A footing that was stopped in its second iteration, with an op in flight, and the ballot of that iteration."""
    footing = begin(optimizer, is_exact)
    footing.confirm(reduce(footing, 0)(LARGE), nobody)
    ballot = None
    if is_held:
        ballot = reduce(footing, 1, [Span("1F0@0", 10, 20)])
        if is_applied:
            footing.apply(1.0)
    else:  # in the middle of its backward passes, or of the reduction
        parameters = list(footing.stage.parameters())
        footing.stage.sums.add(parameters, gradients(99, parameters)[0])
    footing.stage.forward(0, torch.ones(2, 3), seed=1, targets=torch.zeros(2, 3))
    return footing, ballot


def goes_on(footing, optimizer, *others):
    """Whether the next iterations are those of plain torch, which was never stopped and found `others` so far."""
    plain = Plain(optimizer).steps(*others)
    assert footing.num_steps == len(others)
    assert is_same(footing, plain)
    for iteration in range(len(others), len(others) + 2):
        ballot = reduce(footing, iteration)
        footing.apply(1.0)
        footing.confirm(ballot(LARGE), nobody)
        plain.step(iteration, LARGE)
    return is_same(footing, plain)


everywhere = pytest.mark.parametrize("optimizer", OPTIMIZERS)
in_both_arithmetics = pytest.mark.parametrize("is_exact", [False, True])


@everywhere
@in_both_arithmetics
@pytest.mark.parametrize("is_applied", [False, True])
@pytest.mark.parametrize("other", [FINE, LARGE, INFINITE])
def test_a_settled_iteration_is_confirmed_by_its_ballot(optimizer, is_exact, is_applied, other):
    footing, ballot = stopped(optimizer, is_exact, True, is_applied)
    reports = Reports()
    assert not footing.go_to(2, ballot(other), reports)
    assert [(iteration, losses) for iteration, losses, *_ in reports] == [(1, dict(enumerate(LOSSES)))]
    assert footing.stage.num_in_flight == 0
    assert footing.standing() == ProgressReport(2, None, ballot(other))
    assert goes_on(footing, optimizer, LARGE, other)


@everywhere
@in_both_arithmetics
@pytest.mark.parametrize(("is_held", "is_applied"), [(False, False), (True, False), (True, True)])
def test_an_iteration_that_is_not_settled_is_taken_back_and_done_again(optimizer, is_exact, is_held, is_applied):
    footing, _ = stopped(optimizer, is_exact, is_held, is_applied)
    whole = footing.standing().whole
    reports = Reports()
    assert bool(footing.go_to(1, None, reports)) == is_held  # what it had run of it
    assert reports == []
    assert footing.stage.num_in_flight == 0
    assert footing.standing() == ProgressReport(1, None, whole)
    assert goes_on(footing, optimizer, LARGE)


@everywhere
def test_who_was_confirmed_before_the_others_stays_there_and_hears_nothing_new(optimizer):
    footing, ballot = stopped(optimizer, False, True, True)
    footing.confirm(ballot(FINE), nobody)
    reports = Reports()
    footing.go_to(2, ballot(FINE), reports)
    assert reports == []
    assert goes_on(footing, optimizer, LARGE, FINE)


@everywhere
def test_a_confirmed_step_can_be_taken_back_once(optimizer):
    footing, ballot = stopped(optimizer, False, True, True)
    footing.confirm(ballot(LARGE), nobody)
    footing.go_to(1, None, nobody)
    assert goes_on(footing, optimizer, LARGE)


@everywhere
def test_a_footing_can_be_stopped_again_and_again_in_one_iteration(optimizer):
    footing, _ = stopped(optimizer, False, True, True)
    for is_applied in (True, False, True):
        footing.go_to(1, None, nobody)
        reduce(footing, 1)
        if is_applied:
            footing.apply(1.0)
    footing.go_to(1, None, nobody)
    assert goes_on(footing, optimizer, LARGE)


@pytest.mark.parametrize("iteration", [0, 3])
def test_nobody_goes_where_it_cannot_get(iteration):
    footing, _ = stopped(adamw, False, False, False)
    footing.go_to(1, None, nobody)
    footing.confirm(reduce(footing, 1)(FINE), nobody)
    with pytest.raises(AssertionError, match=f"the weights have 2 steps, but all go on at {iteration}"):
        footing.go_to(iteration, None, nobody)


def test_a_settled_iteration_needs_its_verdict():
    footing, _ = stopped(adamw, False, True, True)
    with pytest.raises(AssertionError, match="iteration 1 is settled, but without a verdict"):
        footing.go_to(2, None, nobody)
