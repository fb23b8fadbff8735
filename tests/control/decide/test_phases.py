"""The transition table: the coordinator makes every transition of the table, and no other."""

from collections.abc import Callable

import pytest

from recycle.control.decide.phases import TRANSITIONS, CoordinatorPhase, PhaseTrigger, Transition, next_phase
from tests.control.decide.coordinator_harness import CoordinatorHarness, with_a_place_free

Scenario = Callable[[], CoordinatorHarness]


def running() -> CoordinatorHarness:
    return CoordinatorHarness().form()


def restarted() -> CoordinatorHarness:
    harness = running()
    harness.start_coordinator()
    return harness


def pausing() -> CoordinatorHarness:
    harness = with_a_place_free()
    harness.join("W1_1")
    return harness


def stopping() -> CoordinatorHarness:
    harness = running()
    harness.die("W1_1")
    return harness


def planning() -> CoordinatorHarness:
    harness = stopping()
    harness.stop_all()
    return harness


def waiting() -> CoordinatorHarness:
    harness = running()
    for name in ("W0_1", "W1_1", "W1_0"):
        harness.die(name)
    harness.stop_all()
    harness.answer()
    return harness


def after(start: Scenario, act: Callable[[CoordinatorHarness], object]) -> Scenario:
    def scenario() -> CoordinatorHarness:
        harness = start()
        act(harness)
        return harness

    return scenario


def end(harness: CoordinatorHarness) -> None:
    harness.coordinator.end("the job is over")


STARTS: dict[CoordinatorPhase, Scenario] = {
    CoordinatorPhase.FORMING: CoordinatorHarness,
    CoordinatorPhase.RUNNING: running,
    CoordinatorPhase.PAUSING: pausing,
    CoordinatorPhase.STOPPING: stopping,
    CoordinatorPhase.PLANNING: planning,
    CoordinatorPhase.WAITING: waiting,
}
SCENARIOS: list[Scenario] = [
    restarted,
    *STARTS.values(),
    after(running, lambda harness: harness.coordinator.stop_early()),
    after(running, lambda harness: harness.leave("W1_1")),
    after(running, lambda harness: harness.coordinator.change_plan("a worker is slow")),
    after(pausing, lambda harness: harness.stop_all()),
    after(pausing, lambda harness: harness.die("W1_0")),
    after(planning, lambda harness: harness.answer()),
    after(planning, lambda harness: harness.die("W1_0")),
    after(waiting, lambda harness: harness.join()),
    *(after(start, end) for start in STARTS.values()),
]


@pytest.mark.parametrize("phase", STARTS)
def test_a_scenario_ends_in_its_phase(phase: CoordinatorPhase) -> None:
    assert STARTS[phase]().phase is phase


def test_the_coordinator_makes_every_transition_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made: set[tuple[CoordinatorPhase, PhaseTrigger]] = set()

    def recorded(phase: CoordinatorPhase, trigger: PhaseTrigger) -> CoordinatorPhase:
        made.add((phase, trigger))
        return next_phase(phase, trigger)

    monkeypatch.setattr("recycle.control.decide.coordinator.next_phase", recorded)
    for scenario in SCENARIOS:
        scenario()
    assert made == {(phase, trigger) for phase, row in TRANSITIONS.items() for trigger in row}


def test_a_transition_that_the_table_lacks_is_refused_with_both_names() -> None:
    with pytest.raises(AssertionError, match="phase WAITING has no transition for EPOCH_BROKEN"):
        next_phase(CoordinatorPhase.WAITING, PhaseTrigger.EPOCH_BROKEN)


def test_a_job_that_is_done_stays_done() -> None:
    harness = running()
    end(harness)
    num_sent = len(harness.effects.sent[1])
    end(harness)
    assert harness.phase is CoordinatorPhase.DONE
    assert len(harness.effects.sent[1]) == num_sent
    assert TRANSITIONS[CoordinatorPhase.DONE] == {}


def test_every_phase_has_a_row_and_every_transition_a_reason_of_its_own_sentence() -> None:
    assert set(TRANSITIONS) == set(CoordinatorPhase)
    assert all(reason for row in TRANSITIONS.values() for _, reason in row.values())


def test_the_first_epoch_starts_when_every_row_has_a_member() -> None:
    started = TRANSITIONS[CoordinatorPhase.FORMING][PhaseTrigger.EPOCH_STARTED]
    assert started == Transition(CoordinatorPhase.RUNNING, "every row of the first plan has a member")
