"""`agree`: all survivors can reach the iteration, and no step whose verdict a survivor received is taken back."""

import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from recycle.control.decide.agreement import ABSENT, NoAgreement, Resume, agree
from recycle.control.decide.messages import Ballot, ProgressReport

pytestmark = pytest.mark.timeout(60)
ODD = (0.5, math.nan, 3.25, math.inf, 0.0, 1e-300, 1e300)


def truth(iteration: int, num_stages: int) -> Ballot:
    """The ballot of an iteration, which is the same however often it is done: a few of its numbers are none."""
    norms = tuple(ODD[(3 * iteration + stage) % len(ODD)] for stage in range(num_stages))
    return Ballot(iteration, norms)


def is_same(one: Ballot | None, other: Ballot | None) -> bool:
    """Equal bit for bit, NaNs too."""
    if one is None or other is None:
        return one is other
    return (one.iteration, _bits(one.norms)) == (other.iteration, _bits(other.norms))


def _bits(values: Iterable[float]) -> bytes:
    return b"".join(struct.pack("d", value) for value in values)


@dataclass
class StateModel:
    """A model of a worker's `StageState` without weights. `own` is the iteration whose gradient it holds without a verdict."""

    stage: int
    num_stages: int
    num_steps: int = 0
    own: int | None = None
    whole: Ballot | None = None
    can_take_back: bool = False

    @property
    def num_reduced(self) -> int:
        return self.num_steps if self.own is None else self.own + 1

    @property
    def num_settled(self) -> int:
        return self.num_steps if self.own is None else self.own

    def progress(self) -> ProgressReport:
        own = None
        if self.own is not None:
            whole = truth(self.own, self.num_stages)
            norms = [norm if stage == self.stage else ABSENT for stage, norm in enumerate(whole.norms)]
            own = Ballot(self.own, tuple(norms))
        return ProgressReport(self.num_steps, own, self.whole)

    def reduce(self) -> None:
        self.own = self.num_steps

    def apply(self) -> None:
        self.num_steps, self.can_take_back = self.num_steps + 1, True

    def settle(self, ballot: Ballot) -> None:
        """Take the verdict: a gradient that is not applied yet is applied."""
        assert self.own == ballot.iteration
        if self.num_steps == self.own:
            self.apply()
        self.own, self.whole = None, ballot

    def go_to(self, iteration: int, ballot: Ballot | None) -> None:
        """Go to an iteration as a `StageState` does: settle the held gradient by the ballot, or take back one step."""
        if self.own is not None and self.own == iteration - 1:
            assert ballot is not None, "it is settled without a verdict"
            self.settle(ballot)
        elif self.num_steps == iteration + 1:
            assert self.can_take_back, "there is no step to take back"
            self.num_steps, self.can_take_back = iteration, False
        self.own = None
        assert self.num_steps == iteration


@dataclass
class EpochModel:
    """The workers of an epoch; each may act as soon as the workers that it depends on are far enough."""

    states: list[StateModel]
    is_staggered: bool = True

    def actions(self) -> list[Callable[[], None]]:
        """All actions that may happen next."""
        return [action for state in self.states for action in self.actions_of(state)]

    def actions_of(self, state: StateModel) -> list[Callable[[], None]]:
        if state.own is None:
            # A reduction needs all peers, and a peer computes no gradient before it has the verdict on the last step.
            peers = [peer for peer in self.states if peer.stage == state.stage]
            return [state.reduce] if all(peer.num_settled >= state.num_steps for peer in peers) else []
        found: list[Callable[[], None]] = []
        if self.is_staggered and state.num_steps == state.own:
            found.append(state.apply)
        if all(other.num_reduced > state.own for other in self.states):
            ballot = truth(state.own, state.num_stages)
            found.append(lambda: state.settle(ballot))
        return found


class Training(RuleBasedStateMachine):
    """Workers that train on their own, and failures at any moment that leave a worker at every stage."""

    @initialize(num_stages=st.integers(1, 4), num_peers=st.integers(1, 3), is_staggered=st.booleans())
    def begin(self, num_stages: int, num_peers: int, is_staggered: bool) -> None:
        self.num_stages = num_stages
        states = [StateModel(stage, num_stages) for stage in range(num_stages) for _ in range(num_peers)]
        self.epoch_model = EpochModel(states, is_staggered)

    @rule(picks=st.lists(st.integers(0, 1000), min_size=1, max_size=30))
    def train(self, picks: list[int]) -> None:
        for pick in picks:
            actions = self.epoch_model.actions()
            actions[pick % len(actions)]()

    @rule(kills=st.lists(st.integers(0, 11), max_size=8), newcomers=st.lists(st.integers(0, 3), max_size=3))
    def fail(self, kills: list[int], newcomers: list[int]) -> None:
        everybody = list(self.epoch_model.states)
        survivors = self._without(kills)
        reports = [state.progress() for state in survivors]
        resume = agree(reports)
        before = [state.num_settled for state in survivors]
        self._hold(resume, everybody, survivors)
        for state in survivors:
            state.go_to(resume.iteration, resume.ballot)
        assert min(state.num_settled for state in survivors) >= max(before), "a step with a verdict was taken back"
        joined = [
            StateModel(stage % self.num_stages, self.num_stages, num_steps=resume.iteration)
            for stage in newcomers
            if sum(state.stage == stage % self.num_stages for state in survivors) < 3
        ]
        self.epoch_model.states = [*survivors, *joined]

    def _without(self, kills: list[int]) -> list[StateModel]:
        left = list(self.epoch_model.states)
        for kill in kills:
            state = self.epoch_model.states[kill % len(self.epoch_model.states)]
            if state in left and sum(other.stage == state.stage for other in left) > 1:
                left = [other for other in left if other is not state]
        return left

    def _hold(self, resume: Resume, everybody: list[StateModel], survivors: list[StateModel]) -> None:
        in_flight = max(state.num_reduced for state in everybody) - 1
        assert resume.iteration >= in_flight, "more than the iteration in flight is redone, the dead workers' work included"
        assert resume.iteration <= min(state.num_reduced for state in survivors)
        if resume.ballot is not None:
            assert is_same(resume.ballot, truth(resume.iteration - 1, self.num_stages))

    @invariant()
    def nobody_is_more_than_one_ahead(self) -> None:
        if hasattr(self, "epoch_model"):
            reduced = [state.num_reduced for state in self.epoch_model.states]
            assert max(reduced) - min(reduced) <= 1


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


def part(iteration: int, norms: tuple[float, ...]) -> ProgressReport:
    return ProgressReport(iteration, Ballot(iteration, norms))


def test_all_resume_where_they_are_if_no_gradient_is_held() -> None:
    assert agree([ProgressReport(7), ProgressReport(7)]) == Resume(7)


def test_a_worker_takes_its_step_back_if_another_has_no_gradient() -> None:
    ahead = ProgressReport(8, Ballot(7, (1.0, ABSENT)))
    assert agree([ahead, ProgressReport(7)]) == Resume(7)


def test_a_verdict_that_one_survivor_received_settles_the_step_for_all() -> None:
    whole = Ballot(7, (1.0, 2.0))
    held = part(7, (1.0, ABSENT))
    assert agree([held, ProgressReport(8, None, whole)]) == Resume(8, whole)


def test_survivors_parts_form_the_ballot_that_no_survivor_received() -> None:
    resume = agree([part(7, (math.inf, ABSENT)), part(7, (ABSENT, math.nan))])
    assert resume.iteration == 8
    assert is_same(resume.ballot, Ballot(7, (math.inf, math.nan)))


def test_a_step_is_redone_if_no_survivor_has_the_norm_of_a_stage() -> None:
    assert agree([part(7, (1.0, ABSENT)), part(7, (1.0, ABSENT))]) == Resume(7)


def test_an_older_ballot_settles_nothing() -> None:
    old = Ballot(6, (1.0, 2.0))
    assert agree([ProgressReport(7, Ballot(7, (1.0, ABSENT)), old), ProgressReport(7, None, old)]) == Resume(7)


def test_survivors_two_steps_apart_cannot_agree_and_the_error_has_their_steps() -> None:
    with pytest.raises(NoAgreement, match="iteration 5: they stand at 7, 5"):
        agree([ProgressReport(7), ProgressReport(5)])


def test_agreement_does_not_depend_on_the_order_of_survivors() -> None:
    whole = Ballot(3, (1.0, 2.0))
    reports = [ProgressReport(4, None, whole), part(3, (1.0, ABSENT)), ProgressReport(4, Ballot(3, (ABSENT, 2.0)))]
    assert agree(reports) == agree(reports[::-1]) == Resume(4, whole)
