"""Where training goes on: whoever is left can get there, and nothing of which a survivor heard the verdict is taken back."""

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
class Walker:
    """What a worker's footing is, without weights. `own` is the iteration of which it holds the gradient without a verdict."""

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
    def num_heard(self) -> int:
        return self.num_steps if self.own is None else self.own

    def standing(self) -> ProgressReport:
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

    def hear(self, ballot: Ballot) -> None:
        """The verdict has come: what was guessed stays or is done anew, and what was not is applied."""
        assert self.own == ballot.iteration
        if self.num_steps == self.own:
            self.apply()
        self.own, self.whole = None, ballot

    def go_to(self, iteration: int, ballot: Ballot | None) -> None:
        """What a footing does, held to its rules: settle what is held by the ballot, or take one step back."""
        if self.own is not None and self.own == iteration - 1:
            assert ballot is not None, "it is settled without a verdict"
            self.hear(ballot)
        elif self.num_steps == iteration + 1:
            assert self.can_take_back, "there is no step to take back"
            self.num_steps, self.can_take_back = iteration, False
        self.own = None
        assert self.num_steps == iteration


@dataclass
class Crew:
    """The workers of an epoch, each of which may go on as soon as those whom it needs have gone so far."""

    walkers: list[Walker]
    is_staggered: bool = True

    def moves(self) -> list[Callable[[], None]]:
        """Everything that may happen next."""
        return [move for walker in self.walkers for move in self.moves_of(walker)]

    def moves_of(self, walker: Walker) -> list[Callable[[], None]]:
        if walker.own is None:
            # A reduction takes all peers, and a peer computes no gradient before it has heard the verdict on the last step.
            peers = [peer for peer in self.walkers if peer.stage == walker.stage]
            return [walker.reduce] if all(peer.num_heard >= walker.num_steps for peer in peers) else []
        found: list[Callable[[], None]] = []
        if self.is_staggered and walker.num_steps == walker.own:
            found.append(walker.apply)
        if all(other.num_reduced > walker.own for other in self.walkers):
            ballot = truth(walker.own, walker.num_stages)
            found.append(lambda: walker.hear(ballot))
        return found


class Training(RuleBasedStateMachine):
    """Workers that go on by themselves, and failures at any moment that leave somebody at every stage."""

    @initialize(num_stages=st.integers(1, 4), num_peers=st.integers(1, 3), is_staggered=st.booleans())
    def begin(self, num_stages: int, num_peers: int, is_staggered: bool) -> None:
        self.num_stages = num_stages
        walkers = [Walker(stage, num_stages) for stage in range(num_stages) for _ in range(num_peers)]
        self.crew = Crew(walkers, is_staggered)

    @rule(picks=st.lists(st.integers(0, 1000), min_size=1, max_size=30))
    def go_on(self, picks: list[int]) -> None:
        for pick in picks:
            moves = self.crew.moves()
            moves[pick % len(moves)]()

    @rule(kills=st.lists(st.integers(0, 11), max_size=8), newcomers=st.lists(st.integers(0, 3), max_size=3))
    def fail(self, kills: list[int], newcomers: list[int]) -> None:
        everybody = list(self.crew.walkers)
        survivors = self._without(kills)
        standings = [walker.standing() for walker in survivors]
        resume = agree(standings)
        before = [walker.num_heard for walker in survivors]
        self._hold(resume, everybody, survivors)
        for walker in survivors:
            walker.go_to(resume.iteration, resume.ballot)
        assert min(walker.num_heard for walker in survivors) >= max(before), "a verdict that was heard was taken back"
        joined = [
            Walker(stage % self.num_stages, self.num_stages, num_steps=resume.iteration)
            for stage in newcomers
            if sum(walker.stage == stage % self.num_stages for walker in survivors) < 3
        ]
        self.crew.walkers = [*survivors, *joined]

    def _without(self, kills: list[int]) -> list[Walker]:
        left = list(self.crew.walkers)
        for kill in kills:
            walker = self.crew.walkers[kill % len(self.crew.walkers)]
            if walker in left and sum(other.stage == walker.stage for other in left) > 1:
                left = [other for other in left if other is not walker]
        return left

    def _hold(self, resume: Resume, everybody: list[Walker], survivors: list[Walker]) -> None:
        in_flight = max(walker.num_reduced for walker in everybody) - 1
        assert resume.iteration >= in_flight, "more than the iteration in flight is done again, the dead ones' work included"
        assert resume.iteration <= min(walker.num_reduced for walker in survivors)
        if resume.ballot is not None:
            assert is_same(resume.ballot, truth(resume.iteration - 1, self.num_stages))

    @invariant()
    def nobody_is_more_than_one_ahead(self) -> None:
        if hasattr(self, "crew"):
            reduced = [walker.num_reduced for walker in self.crew.walkers]
            assert max(reduced) - min(reduced) <= 1


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


def part(iteration: int, norms: tuple[float, ...]) -> ProgressReport:
    return ProgressReport(iteration, Ballot(iteration, norms))


def test_all_go_on_where_they_are_if_nothing_is_held() -> None:
    assert agree([ProgressReport(7), ProgressReport(7)]) == Resume(7)


def test_who_stepped_takes_it_back_if_another_has_no_gradient() -> None:
    ahead = ProgressReport(8, Ballot(7, (1.0, ABSENT)))
    assert agree([ahead, ProgressReport(7)]) == Resume(7)


def test_a_verdict_that_one_survivor_heard_settles_the_step_for_all() -> None:
    whole = Ballot(7, (1.0, 2.0))
    held = part(7, (1.0, ABSENT))
    assert agree([held, ProgressReport(8, None, whole)]) == Resume(8, whole)


def test_survivors_parts_make_up_the_ballot_that_nobody_heard() -> None:
    resume = agree([part(7, (math.inf, ABSENT)), part(7, (ABSENT, math.nan))])
    assert resume.iteration == 8
    assert is_same(resume.ballot, Ballot(7, (math.inf, math.nan)))


def test_a_step_is_done_again_if_nobody_is_left_who_speaks_for_a_stage() -> None:
    assert agree([part(7, (1.0, ABSENT)), part(7, (1.0, ABSENT))]) == Resume(7)


def test_an_older_ballot_settles_nothing() -> None:
    old = Ballot(6, (1.0, 2.0))
    assert agree([ProgressReport(7, Ballot(7, (1.0, ABSENT)), old), ProgressReport(7, None, old)]) == Resume(7)


def test_survivors_two_steps_apart_cannot_agree_and_are_told_where_they_stand() -> None:
    with pytest.raises(NoAgreement, match="iteration 5: they stand at 7, 5"):
        agree([ProgressReport(7), ProgressReport(5)])


def test_agreement_does_not_depend_on_the_order_of_survivors() -> None:
    whole = Ballot(3, (1.0, 2.0))
    standings = [ProgressReport(4, None, whole), part(3, (1.0, ABSENT)), ProgressReport(4, Ballot(3, (ABSENT, 2.0)))]
    assert agree(standings) == agree(standings[::-1]) == Resume(4, whole)
