"""The state of a stage: whatever was guessed, taken back, settled late or done again, its weights are those of plain torch."""

import math
from functools import partial

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
from recycle.runtime.execute.spans import Span
from recycle.runtime.job import TrainOptions
from recycle.runtime.worker.epoch_setup import make_stage_state
from recycle.runtime.worker.worker_spec import WorkerSpec, copied_stage
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
    """The state of a worker of one of two stages, by default the last."""
    spec = WorkerSpec(
        shape=SHAPE,
        make_stage=partial(copied_stage, make_modules()),
        boundaries={},
        ties=ties,
        microbatches=Numbers(),
        loss=loss,
        make_optimizer=optimizer,
        num_steps=9,
        options=TrainOptions(is_exact=is_exact, max_norm=MAX_NORM, schedule=falling),
    )
    return make_stage_state(spec, stage)


def gradients(iteration, parameters):
    """What each of two micro-batches adds in an iteration: multiples of 1/256, of which a sum is the same in any arithmetic."""
    generator = torch.Generator().manual_seed(iteration)
    return [[torch.randint(-256, 256, of.shape, generator=generator) / 256 for of in parameters] for _ in range(2)]


def reduce(state, iteration, spans=()):
    """Compute an iteration up to the gradient of all peers; return the ballot but for the other stage."""
    parameters = list(state.stage.parameters())
    for contribution in gradients(iteration, parameters):
        state.stage.sums.add(parameters, contribution)
    state.hold(iteration, dict(enumerate(LOSSES)), spans)
    norm = state.norm_squared()
    return lambda other: Ballot(iteration, (other, 0.0, 0.0, *norm))


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


def is_same(state, plain):
    """Whether weights and optimizer are equal, bit for bit."""
    return held(state.stage.module, state.stepper.optimizer) == held(plain.module, plain.optimizer)


def ignore(*report):
    pass


class Reports(list):
    def __call__(self, iteration, losses, spans, verdict):
        self.append((iteration, dict(losses), list(spans), verdict))


# One step after the other.


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("is_exact", [False, True])
def test_a_guess_that_was_right_is_the_step_itself(optimizer, is_exact):
    state = begin(optimizer, is_exact)
    for iteration in range(3):
        ballot = reduce(state, iteration)
        state.apply(1.0)
        assert state.confirm(ballot(FINE), ignore)
    assert state.num_steps == 3
    assert is_same(state, Plain(optimizer).steps(FINE, FINE, FINE))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("other", [LARGE, INFINITE, math.nan])
def test_a_guess_that_was_wrong_is_as_if_it_had_waited(optimizer, is_exact, other):
    state = begin(optimizer, is_exact)
    for iteration, found in enumerate((FINE, other, FINE)):
        ballot = reduce(state, iteration)
        state.apply(1.0)
        assert state.confirm(ballot(found), ignore) == (found == FINE)
    assert is_same(state, Plain(optimizer).steps(FINE, other, FINE))


steps = st.lists(
    st.tuples(st.sampled_from([1.0, "what is right", "nothing"]), st.sampled_from([FINE, LARGE, INFINITE])), max_size=5
)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=30, deadline=None)
@given(steps=steps)
def test_whatever_was_applied_before_the_verdict_was_heard_counts_for_nothing(optimizer, steps):
    state, plain = begin(optimizer), Plain(optimizer)
    for iteration, (guess, other) in enumerate(steps):
        ballot = reduce(state, iteration)(other)
        scale = state.judge(ballot).scale
        if guess != "nothing":
            state.apply(1.0 if guess == 1.0 else scale)
        assert state.confirm(ballot, ignore) == (guess != "nothing" and (guess != 1.0 or scale == 1.0))
        assert is_same(state, plain.step(iteration, other))
        assert state.progress() == ProgressReport(iteration + 1, None, ballot)


def test_an_iteration_is_held_once_and_in_its_turn():
    state = begin(adamw)
    with pytest.raises(AssertionError, match="iteration 1 is to be applied after 0 steps"):
        state.hold(1, {}, ())
    reduce(state, 0)
    with pytest.raises(AssertionError, match="still to be confirmed"):
        state.hold(0, {}, ())
    with pytest.raises(AssertionError, match="a verdict on iteration 4, not 0"):
        state.confirm(Ballot(4, (0.0, 1.0)), ignore)


def test_an_iteration_is_reported_once_when_it_cannot_be_taken_back_with_its_losses():
    state, reports, spans = begin(sgd), Reports(), [Span("0F0@0", 1, 2)]
    reduce(state, 0, spans)
    state.apply(1.0)
    spans.append(Span("optimizer", 2, 3))
    assert reports == []
    state.confirm(Ballot(0, (90.0**2, 90.0**2)), reports)
    norm = math.sqrt(2) * 90
    assert reports == [(0, dict(enumerate(LOSSES)), spans, StepVerdict(pytest.approx(norm), pytest.approx(MAX_NORM / norm)))]


def test_a_tied_parameter_counts_for_the_norm_of_its_first_stage_alone():
    tie = Tie(((0, ("0.weight",)), (1, ("0.weight",))))
    norms = []
    for stage, ties in ((0, ()), (0, [tie]), (1, ()), (1, [tie])):
        state = begin(sgd, stage=stage, ties=ties)
        reduce(state, 0)
        norms.append(math.fsum(state.norm_squared()))
    tied = gradients(0, list(make_modules()[1].parameters()))
    own = float(((tied[0][0] + tied[1][0]) / 2).double().square().sum())
    assert norms[0] == norms[1]
    assert norms[2] - norms[3] == pytest.approx(own, rel=1e-12)


# Its progress.


def test_a_state_without_a_step_reports_its_beginning():
    assert begin(adamw).progress() == ProgressReport(0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("is_applied", [False, True])
def test_who_holds_a_gradient_says_its_own_part_and_what_it_heard_last(optimizer, is_applied):
    state = begin(optimizer)
    first = reduce(state, 0)(FINE)
    state.confirm(first, ignore)
    norm = reduce(state, 1)(FINE).norms[3:]
    if is_applied:
        state.apply(1.0)
    assert state.progress() == ProgressReport(1 + is_applied, Ballot(1, (ABSENT, ABSENT, ABSENT, *norm)), first)
    assert state.progress().num_reduced == 2


# Where all go on.


def stopped(optimizer, is_exact, is_held, is_applied):
    """A state that was stopped in its second iteration, with an op in flight, and the ballot of that iteration."""
    state = begin(optimizer, is_exact)
    state.confirm(reduce(state, 0)(LARGE), ignore)
    ballot = None
    if is_held:
        ballot = reduce(state, 1, [Span("1F0@0", 10, 20)])
        if is_applied:
            state.apply(1.0)
    else:  # in the middle of its backward passes, or of the reduction
        parameters = list(state.stage.parameters())
        state.stage.sums.add(parameters, gradients(99, parameters)[0])
    state.stage.forward(0, torch.ones(2, 3), seed=1, targets=torch.zeros(2, 3))
    return state, ballot


def goes_on(state, optimizer, *others):
    """Whether the next iterations are those of plain torch, which was never stopped and found `others` so far."""
    plain = Plain(optimizer).steps(*others)
    assert state.num_steps == len(others)
    assert is_same(state, plain)
    for iteration in range(len(others), len(others) + 2):
        ballot = reduce(state, iteration)
        state.apply(1.0)
        state.confirm(ballot(LARGE), ignore)
        plain.step(iteration, LARGE)
    return is_same(state, plain)


everywhere = pytest.mark.parametrize("optimizer", OPTIMIZERS)
in_both_arithmetics = pytest.mark.parametrize("is_exact", [False, True])


@everywhere
@in_both_arithmetics
@pytest.mark.parametrize("is_applied", [False, True])
@pytest.mark.parametrize("other", [FINE, LARGE, INFINITE])
def test_a_settled_iteration_is_confirmed_by_its_ballot(optimizer, is_exact, is_applied, other):
    state, ballot = stopped(optimizer, is_exact, True, is_applied)
    reports = Reports()
    assert not state.resume_at(2, ballot(other), reports)
    assert [(iteration, losses) for iteration, losses, *_ in reports] == [(1, dict(enumerate(LOSSES)))]
    assert state.stage.num_in_flight == 0
    assert state.progress() == ProgressReport(2, None, ballot(other))
    assert goes_on(state, optimizer, LARGE, other)


@everywhere
@in_both_arithmetics
@pytest.mark.parametrize(("is_held", "is_applied"), [(False, False), (True, False), (True, True)])
def test_an_iteration_that_is_not_settled_is_taken_back_and_done_again(optimizer, is_exact, is_held, is_applied):
    state, _ = stopped(optimizer, is_exact, is_held, is_applied)
    whole = state.progress().whole
    reports = Reports()
    assert bool(state.resume_at(1, None, reports)) == is_held  # what it had run of it
    assert reports == []
    assert state.stage.num_in_flight == 0
    assert state.progress() == ProgressReport(1, None, whole)
    assert goes_on(state, optimizer, LARGE)


@everywhere
def test_who_was_confirmed_before_the_others_stays_there_and_hears_nothing_new(optimizer):
    state, ballot = stopped(optimizer, False, True, True)
    state.confirm(ballot(FINE), ignore)
    reports = Reports()
    state.resume_at(2, ballot(FINE), reports)
    assert reports == []
    assert goes_on(state, optimizer, LARGE, FINE)


@everywhere
def test_a_confirmed_step_can_be_taken_back_once(optimizer):
    state, ballot = stopped(optimizer, False, True, True)
    state.confirm(ballot(LARGE), ignore)
    state.resume_at(1, None, ignore)
    assert goes_on(state, optimizer, LARGE)


@everywhere
def test_a_state_can_be_stopped_again_and_again_in_one_iteration(optimizer):
    state, _ = stopped(optimizer, False, True, True)
    for is_applied in (True, False, True):
        state.resume_at(1, None, ignore)
        reduce(state, 1)
        if is_applied:
            state.apply(1.0)
    state.resume_at(1, None, ignore)
    assert goes_on(state, optimizer, LARGE)


@pytest.mark.parametrize("iteration", [0, 3])
def test_no_state_resumes_at_an_iteration_that_it_cannot_reach(iteration):
    state, _ = stopped(adamw, False, False, False)
    state.resume_at(1, None, ignore)
    state.confirm(reduce(state, 1)(FINE), ignore)
    with pytest.raises(AssertionError, match=f"the weights have 2 steps, but all go on at {iteration}"):
        state.resume_at(iteration, None, ignore)


def test_a_settled_iteration_needs_its_verdict():
    state, _ = stopped(adamw, False, True, True)
    with pytest.raises(AssertionError, match="iteration 1 is settled, but without a verdict"):
        state.resume_at(2, None, ignore)
