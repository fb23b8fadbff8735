"""The run ledger: an iteration is recorded once, when all workers that will ever report it have done so."""

import math
from dataclasses import replace

import pytest
from msgspec import structs

from recycle.core.cluster import Worker
from recycle.core.events.record import OpRan, Recovered, Saved, Spell, Stepped, Warned
from recycle.report.record.hindsight import in_hindsight
from recycle.report.record.metrics import measure
from recycle.runtime.checkpoint.folder import CheckpointComplete, CheckpointIncomplete
from recycle.runtime.checkpoint.writer import StageNotSaved, StageSaved
from recycle.runtime.execute.spans import Span, columns_of
from recycle.runtime.worker.worker_reports import StepUndone, WorkerWarned
from tests.runtime.coordinator.ledgers import (
    NAMES,
    SAMPLES,
    SURVIVORS,
    add,
    applied,
    of,
    open_ledger,
    ops,
    plan,
    report,
    spells,
    start_epoch,
    steps,
    undo,
    unpacked,
)

pytestmark = pytest.mark.timeout(60)


def test_an_iteration_is_recorded_when_the_last_worker_has_reported_it():
    ledger, written = open_ledger()
    report(ledger, NAMES[1:], 0)
    assert (written, ledger.num_steps) == ([], 0)
    assert ledger.is_pending(applied("W0_1", 0))
    report(ledger, NAMES[:1], 0)
    assert [type(event) for event in unpacked(written)] == [*[OpRan] * 4, Spell, Spell, Stepped]
    assert (steps(written), ledger.num_steps) == ([(0, 1.0)], 1)
    assert not ledger.is_pending(applied("W0_1", 0))


def test_a_report_that_is_added_twice_is_recorded_once():
    ledger, written = open_ledger()
    report(ledger, [*NAMES, *NAMES], 0)
    report(ledger, ["W0_0", "W0_0", *NAMES[1:]], 1)
    assert steps(written) == [(0, 1.0), (1, 1.0)]
    assert ops(written, 1) == NAMES


def test_a_fast_worker_may_be_an_iteration_ahead():
    ledger, written = open_ledger()
    report(ledger, NAMES[:2], 0)
    report(ledger, NAMES[:2], 1)
    report(ledger, NAMES[2:], 0)
    assert steps(written) == [(0, 1.0)]
    report(ledger, NAMES[2:], 1)
    assert steps(written) == [(0, 1.0), (1, 1.0)]


# From one epoch to the next.


@pytest.mark.parametrize("reported_before", [[], ["W0_0"], ["W1_1"], ["W0_1", "W1_1"], SURVIVORS])
def test_the_survivors_reports_complete_an_iteration_that_was_settled_after_a_death(reported_before):
    ledger, written = open_ledger()
    report(ledger, reported_before, 0)
    start_epoch(ledger, plan("W1_1"), 1, SURVIVORS)
    report(ledger, [name for name in SURVIVORS if name not in reported_before], 0)
    assert steps(written) == [(0, 1.0)]
    assert ops(written, 0) == sorted({*SURVIVORS, *reported_before})
    report(ledger, SURVIVORS, 1)
    assert steps(written) == [(0, 1.0), (1, 1.0)]


@pytest.mark.parametrize("reported_before", [[], ["W0_1"]])
def test_a_new_worker_need_not_report_iterations_before_it(reported_before):
    # W1_1 was killed, and another process took its place before training resumed.
    ledger, written = open_ledger()
    report(ledger, reported_before, 0)
    start_epoch(ledger, plan(), 1, SURVIVORS)
    report(ledger, [name for name in SURVIVORS if name not in reported_before], 0)
    assert steps(written) == [(0, 1.0)]
    report(ledger, NAMES, 1)
    assert steps(written) == [(0, 1.0), (1, 1.0)]


def test_an_iteration_counts_with_the_plan_by_which_it_ran():
    ledger, written = open_ledger()
    report(ledger, NAMES, 0)
    start_epoch(ledger, plan("W1_1"), 2, SURVIVORS)
    report(ledger, SURVIVORS, 1)
    report(ledger, SURVIVORS, 2)
    assert [event.num_live for event in written if isinstance(event, Spell) and event.state == "train"] == [4, 4, 3]


def test_an_iteration_that_is_redone_is_reported_again():
    ledger, written = open_ledger()
    report(ledger, NAMES, 0)
    report(ledger, ["W0_0", "W0_1"], 1, loss=7.0)
    start_epoch(ledger, plan("W1_1"), 1, SURVIVORS)
    assert not ledger.is_pending(applied("W0_0", 1))
    report(ledger, SURVIVORS, 1, loss=2.0)
    assert steps(written) == [(0, 1.0), (1, 2.0)]


def test_steps_after_a_checkpoint_that_all_load_are_redone():
    ledger, written = open_ledger()
    for iteration in range(3):
        report(ledger, NAMES, iteration)
    start_epoch(ledger, plan("W1_1"), 1, [])
    assert ledger.num_steps == 1
    report(ledger, SURVIVORS, 1, loss=2.0)
    assert steps(written) == [(0, 1.0), (1, 1.0), (2, 1.0), (1, 2.0)]
    assert ledger.summary(2, {}).losses == (1.0, 2.0)


def test_undone_ops_are_recorded_as_in_vain():
    ledger, written = open_ledger()
    add(ledger, StepUndone(Worker.parse("W1_0"), 3, columns_of([Span("0F0@1", 10, 20), Span("0F1@1", 20, 30, True)])))
    assert unpacked(written) == [OpRan(3, "W1_0", "0F0@1", 10, 20, True), OpRan(3, "W1_0", "0F1@1", 20, 30, True)]
    assert not ledger.is_pending(StepUndone(Worker.parse("W1_0"), 3, columns_of([])))


def test_a_recovery_leaves_no_gap_and_is_no_part_of_an_iterations_time():
    ledger, written = open_ledger()
    report(ledger, NAMES, 0)
    undo(ledger, "W0_0", 1, (160, 185), (185, 188))
    start_epoch(ledger, plan("W1_1"), 1, SURVIVORS)
    event = Recovered(190, 200, 2, ("W1_1",), False, "killed", 1, detect_us=1, abort_us=2, plan_us=3, regroup_us=4)
    ledger.add_recovery(event)
    report(ledger, SURVIVORS, 1)
    assert spells(written) == [
        (0, 100, "pause", "start"),
        (100, 150, "train", ""),
        (150, 190, "redo", "failure"),
        (190, 191, "pause", "detect"),
        (191, 193, "pause", "abort"),
        (193, 196, "pause", "plan"),
        (196, 200, "pause", "regroup"),
        (200, 250, "train", ""),
    ]
    assert ledger.summary(2, {}).iteration_us == 50
    assert ledger.summary(2, {}).recoveries == (structs.replace(event, redo_us=40, redone_ops=2),)


def test_the_time_of_a_step_that_ended_after_a_failure_belongs_to_the_step():
    ledger, written = open_ledger()
    report(ledger, NAMES, 0)  # it ended at 150, and was settled
    start_epoch(ledger, plan("W1_1"), 1, SURVIVORS)
    ledger.add_recovery(Recovered(140, 180, 2, ("W1_1",), False, "killed", 1, detect_us=5, abort_us=10, regroup_us=25))
    assert spells(written)[-3:] == [(100, 150, "train", ""), (150, 155, "pause", "abort"), (155, 180, "pause", "regroup")]


def test_a_death_in_the_first_step_is_no_part_of_the_start():
    ledger, written = open_ledger()
    undo(ledger, "W0_0", 0, (60, 80))
    start_epoch(ledger, plan("W1_1"), 0, SURVIVORS)
    ledger.add_recovery(Recovered(85, 90, 2, ("W1_1",), False, "killed", 0, regroup_us=5))
    report(ledger, SURVIVORS, 0)
    assert spells(written) == [
        (0, 60, "pause", "start"),
        (60, 85, "redo", "failure"),
        (85, 90, "pause", "regroup"),
        (90, 150, "train", ""),
    ]
    trained = ledger.summary(1, {})
    assert (trained.start_us, trained.iteration_us) == (60, 60)
    assert [(one.redo_us, one.redone_ops) for one in trained.recoveries] == [(25, 1)]


# A worker joins or leaves: all pause after the same step.


def test_nothing_is_redone_after_a_pause_and_waiting_for_others_is_recorded():
    ledger, written = open_ledger()
    report(ledger, NAMES, 0)
    start_epoch(ledger, plan(), 1, NAMES)
    event = Recovered(170, 200, 2, ("W1_1",), True, "it asked to join", 1, regroup_us=30)
    ledger.add_recovery(event, at_boundary=True)
    (recovery,) = ledger.summary(1, {}).recoveries
    assert (recovery.redone_ops, recovery.redo_us, recovery.abort_us) == (0, 0, 20)
    assert spells(written)[-2:] == [(150, 170, "pause", "abort"), (170, 200, "pause", "regroup")]


def test_undone_ops_of_the_new_epoch_belong_to_the_next_recovery():
    ledger, _ = open_ledger()
    report(ledger, NAMES, 0)
    start_epoch(ledger, plan("W1_1"), 1, SURVIVORS)
    undo(ledger, "W0_0", 1, (210, 220))
    ledger.add_recovery(Recovered(160, 200, 2, ("W1_1",), False, "killed", 1, regroup_us=40))
    ledger.add_recovery(Recovered(230, 240, 3, ("W1_0",), False, "killed", 1, regroup_us=10))
    assert [one.redone_ops for one in ledger.summary(1, {}).recoveries] == [0, 1]


# All go back to a checkpoint.


def test_steps_after_a_checkpoint_are_recorded_as_redone_and_their_samples_count_once():
    ledger, written = open_ledger()
    for iteration in range(3):
        report(ledger, NAMES, iteration)
    undo(ledger, "W0_0", 3, (352, 358))
    start_epoch(ledger, plan("W1_1"), 1, [])
    ledger.add_recovery(Recovered(360, 400, 2, ("W1_1", "W0_1"), False, "killed", 1, regroup_us=40))
    (recovery,) = ledger.summary(1, {}).recoveries
    assert recovery.redone_ops == 2 * 4 + 1
    assert recovery.redo_us == 360 - 150
    for iteration in (1, 2, 3):
        for name in SURVIVORS:
            add(ledger, applied(name, iteration, later_us=300))
    run = measure(in_hindsight(of(written, Spell), of(written, Stepped | Recovered)))
    assert run.samples == 4 * SAMPLES
    assert run.redone_samples == 2 * SAMPLES + round(SAMPLES / plan("W1_1").num_ops)
    assert run.redo_us == recovery.redo_us
    assert run.total_us == max(spell.end_us for spell in of(written, Spell))


# Losses that are not finite.


def test_the_first_loss_that_is_not_finite_is_warned_of_and_many_in_a_row_end_the_run():
    problems = []
    ledger, written = open_ledger(fail=problems.append)
    report(ledger, NAMES, 0, loss=1.0)
    for iteration in range(1, 25):
        report(ledger, NAMES, iteration, loss=math.nan)
    assert [event.text for event in of(written, Warned)] == ["the loss of step 2 is nan"]
    report(ledger, NAMES, 25, loss=2.0)  # a finite one in between
    for iteration in range(26, 50):
        report(ledger, NAMES, iteration, loss=math.inf)
    assert problems == []
    report(ledger, NAMES, 50, loss=math.inf)
    assert [str(problem) for problem in problems] == ["the loss was infinite or not a number in 25 steps in a row, to step 51"]


# Peers that hold different weights.


def test_peers_are_compared_when_all_have_reported_and_no_such_state_becomes_a_checkpoint():
    found, saves = [], []
    ledger, _ = open_ledger(differ=found.append, save=saves.append)
    add(ledger, *[replace(applied(name, 0), checksum="aa") for name in NAMES])
    add(ledger, *[replace(applied(name, 1), checksum="bb") for name in NAMES[:3]])
    ledger.add(1, StageSaved(2, 1, "stage-1.safetensors", 10, "00"))
    assert (found, saves) == ([], [])
    add(ledger, replace(applied(NAMES[3], 1), checksum="cc"))
    (differing,) = found
    assert (differing.num_steps, differing.agreed_steps) == (2, 1)
    assert set(differing.checksums) == {Worker(0, 1), Worker(1, 1)}
    ledger.add(0, StageSaved(2, 0, "stage-0.safetensors", 10, "00"))
    assert saves == [StageNotSaved(2, stage, "peers hold different weights") for stage in (1, 0)]


def test_who_moves_still_reports_a_step_at_the_place_where_it_ran_it():
    ledger, written = open_ledger()
    moved = {0: Worker(0, 0), 1: Worker(1, 1), 2: Worker(1, 0)}
    ledger.start_epoch(plan("W0_1"), 0, moved, moved.keys())  # an epoch that nobody began
    ledger.start_epoch(plan("W0_1"), 1, moved, moved.keys())
    assert ledger.late_reporters() == {0: {0, 1, 2}}
    report(ledger, SURVIVORS, 0)
    assert [iteration for iteration, _ in steps(written)] == [0]
    assert ops(written, 0) == SURVIVORS


def test_a_step_whose_losses_died_with_the_last_stage_is_written_without_one():
    ledger, written = open_ledger()
    add(ledger, *[replace(applied(name, 0), losses={}) for name in ("W0_0", "W1_0")])
    start_epoch(ledger, plan(), 1, ["W0_0", "W1_0"])
    assert [(step.iteration, step.loss) for step in of(written, Stepped)] == [(0, None)]
    assert of(written, Warned) == []


def test_a_checkpoint_is_not_completed_before_its_last_step_is_published():
    order = []
    ledger, _ = open_ledger(publish=lambda events: order.append("step"), save=lambda saved: order.append("saved"))
    report(ledger, NAMES[:3], 0)
    ledger.add(0, StageSaved(1, 0, "a file", 1, "a digest"))
    report(ledger, NAMES[3:], 0)
    assert order == ["step", "saved"]


def test_a_checkpoint_that_peers_made_impossible_counts_when_a_later_epoch_completes_it(tmp_path):
    ledger, written = open_ledger(save=lambda saved: None)
    add(ledger, *[replace(applied(name, 0), checksum="aa") for name in NAMES[:3]])
    add(ledger, replace(applied(NAMES[3], 0), checksum="cc"))
    late = StageSaved(1, 0, "stage-0.safetensors", 10, "00")
    assert not ledger.is_pending(late)
    assert ledger.checkpoints.allow_again(1)
    start_epoch(ledger, plan("W1_1"), 1, SURVIVORS)
    assert not ledger.checkpoints.allow_again(1)
    for _ in range(2):  # a file that is reported twice
        ledger.checkpoints.decide([CheckpointComplete(1, tmp_path, 10), CheckpointIncomplete(1, "too late")])
    assert ledger.checkpoints.newest == 1
    assert [event.num_steps for event in of(written, Saved)] == [1]
    assert len(of(written, Warned)) == 1


@pytest.mark.parametrize(("begins_at", "kept"), [(1, [1]), (2, [1, 2])])
def test_no_checkpoint_is_completed_while_the_one_to_go_back_to_is_looked_for(begins_at: int, kept: list[int]) -> None:
    saved: list[int] = []
    ledger, _ = open_ledger(save=lambda report: saved.append(report.num_steps))
    report(ledger, NAMES, 0)
    report(ledger, NAMES, 1)
    ledger.checkpoints.hold()
    for num_steps in (1, 2):
        ledger.add(0, StageSaved(num_steps, 0, "a file", 1, "a digest"))
    assert saved == []
    start_epoch(ledger, plan("W1_1"), begins_at, SURVIVORS)
    assert saved == kept  # not of a step that is done again


def test_reports_that_were_held_count_when_a_checkpoint_is_looked_for_once_more() -> None:
    saved: list[int] = []
    ledger, _ = open_ledger(save=lambda report: saved.append(report.num_steps))
    report(ledger, NAMES, 0)
    ledger.checkpoints.hold()
    ledger.add(0, StageSaved(1, 0, "a file", 1, "a digest"))
    ledger.checkpoints.hold()  # the members have changed meanwhile
    assert saved == [1]


def test_what_a_worker_warns_of_is_written_once():
    """Every epoch has a first worker that says why tensors go slowly."""
    ledger, written = open_ledger()
    add(
        ledger, *(WorkerWarned(Worker.parse(name), text) for name, text in (("W0_0", "slow"), ("W1_1", "late"), ("W0_1", "slow")))
    )
    assert [event.text for event in of(written, Warned)] == ["slow", "late"]
    assert ledger.warnings == ("slow", "late")
