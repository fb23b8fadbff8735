"""Layers that move with an epoch: who sends what to whom, also after a broken transfer, and when a checkpoint is needed."""

from collections.abc import Mapping
from dataclasses import replace

from recycle.control.decide.messages import EpochStopped, LayerTransfer, ProgressReport, StartEpoch
from recycle.core.cluster import Worker
from recycle.core.plans.plan_source import PlanAssignment
from tests.control.decide.coordinator_harness import SHAPE, CoordinatorHarness, answer_for

FIRST, SECOND = (0, 1), (2, 3)


def answer(harness: CoordinatorHarness, counts: tuple[int, ...]) -> None:
    """The source answers the last request with a plan whose stages have so many layers."""
    failed = harness.effects.plan_requests[-1]
    made = answer_for(SHAPE, failed)
    assert isinstance(made, PlanAssignment)
    problem = replace(made.plan.problem, profile=made.plan.problem.profile.with_layers(counts))
    harness.coordinator.plan_received(failed, replace(made, plan=replace(made.plan, problem=problem)))


def stop(harness: CoordinatorHarness, held: Mapping[str, tuple[int, ...]], num_steps: int = 5) -> None:
    for name, layers in held.items():
        place, progress = Worker.parse(name), ProgressReport(num_steps) if layers else None
        stopped = EpochStopped(harness.coordinator.epoch, progress, "", place.stage, harness.coordinator.origin, layers=layers)
        harness.coordinator.receive(harness.at(name), stopped)


def after_a_death() -> CoordinatorHarness:
    """A job of which W1_1 is dead, and the others have stopped with two layers each."""
    harness = CoordinatorHarness().form()
    harness.die("W1_1")
    stop(harness, {"W0_0": FIRST, "W0_1": SECOND, "W1_0": FIRST})
    return harness


def test_members_that_lack_layers_get_them_from_those_that_hold_them() -> None:
    harness = after_a_death()
    answer(harness, (3, 1))
    epoch = harness.started()
    assert (epoch.layer_counts, epoch.sources, epoch.checkpoint, epoch.iteration) == ((3, 1), {}, -1, 5)
    assert epoch.transfers == (LayerTransfer("W0_0", "W0_1", 2, 3), LayerTransfer("W1_0", "W0_1", 2, 3))
    told = harness.last("W1_0")
    assert isinstance(told, StartEpoch)
    assert (told.transfers_layers, told.transfers) == (True, (LayerTransfer("W1_0", "W0_1", 2, 3),))
    assert harness.coordinator.members[harness.at("W0_1").number].has_state


def test_the_same_layers_as_before_are_no_transfer() -> None:
    harness = after_a_death()
    answer(harness, (2, 2))
    epoch = harness.started()
    assert (epoch.layer_counts, epoch.transfers, epoch.moved_layers) == ((2, 2), None, ())


def test_members_that_say_nothing_of_layers_are_taken_by_stage() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W1_1")
    harness.stop_all()
    answer(harness, (3, 1))
    assert harness.started().transfers is None


def test_after_a_transfer_that_was_broken_off_everything_that_is_held_counts() -> None:
    harness = after_a_death()
    answer(harness, (3, 1))
    harness.die("W0_1")  # the only one that held the last layers before; W0_0 has received one of them, and W1_0 none
    stop(harness, {"W0_0": (0, 1, 2), "W1_0": FIRST})
    assert harness.effects.num_searches == 0
    answer(harness, (3, 1))
    assert harness.effects.num_searches == 1, "nobody holds the last layer"
    harness.coordinator.checkpoint_found(4)
    epoch = harness.started()
    assert (epoch.checkpoint, epoch.layer_counts, epoch.transfers) == (4, (3, 1), None)


def test_one_who_has_received_layers_sends_them_on_after_the_death_of_the_sender() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W1_0")
    stop(harness, {"W0_0": FIRST, "W0_1": SECOND, "W1_1": SECOND})
    answer(harness, (1, 3))
    harness.die("W1_1")
    stop(harness, {"W0_0": FIRST, "W0_1": (1, 2, 3)})
    answer(harness, (1, 3))
    epoch = harness.started()
    assert epoch.transfers == ()
    assert (epoch.iteration, epoch.checkpoint) == (5, -1)


def test_one_who_joins_meanwhile_gets_all_its_layers_and_has_no_earlier_iterations_to_report() -> None:
    harness = after_a_death()
    answer(harness, (3, 1))
    harness.begin()
    harness.join("W1_1")
    stop(harness, {"W0_0": (0, 1, 2), "W0_1": (3,), "W1_0": (0, 1, 2)})
    answer(harness, (2, 2))
    epoch = harness.started()
    assert epoch.transfers == (
        LayerTransfer("W0_1", "W0_0", 2, 3),
        LayerTransfer("W1_1", "W1_0", 2, 3),
        LayerTransfer("W1_1", "W0_1", 3, 4),
    )
    assert epoch.sources == {"W1_1": "W1_0"}
