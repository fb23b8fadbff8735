"""The books of a run: an iteration is written down once, when all have told of it who ever will."""

import math
from dataclasses import replace

import pytest

import recycle
from recycle.core.cluster import Worker
from recycle.core.events.record import OpRan, Recovered, Spell, Stepped, Warned, in_hindsight
from recycle.report.record.metrics import measure
from recycle.runtime.compute.optimizer_step import StepVerdict
from recycle.runtime.coordinator.ledger.run_ledger import RunLedger
from recycle.runtime.coordinator.ledger.worker_reports import IterationApplied, StepUndone
from recycle.runtime.execute.spans import Span

pytestmark = pytest.mark.timeout(60)
NAMES = ["W0_0", "W0_1", "W1_0", "W1_1"]
SURVIVORS = [name for name in NAMES if name != "W1_1"]
SAMPLES = 8


def plan(fail=""):
    return recycle.solve(recycle.problem(2, 2, 2, fail=fail, costs=(1, 1, 1)), "greedy")


def open_books(**options):
    """Books of a run of four workers that began at 0, and what they write."""
    written = []
    return RunLedger(plan(), SAMPLES, (), written.append, begin_us=0, **options), written


def applied(name, iteration, loss=1.0, later_us=0):
    """What a worker tells of an iteration; those of the last stage know the losses."""
    worker = Worker.parse(name)
    losses = dict.fromkeys(range(4), loss) if worker.stage == 1 else {}
    start_us = 100 * (iteration + 1) + later_us
    return IterationApplied(
        worker, iteration, losses, [Span(f"{worker.stage}F0@0", start_us, start_us + 50)], StepVerdict(1.0, 1.0)
    )


def hear(books, names, iteration, loss=1.0):
    for name in names:
        books.hear(applied(name, iteration, loss))


def began(books, made, iteration, kept):
    books.began(made, iteration, [Worker.parse(name) for name in kept])


def undo(books, name, iteration, *times_us):
    """A worker tells what it had run of an iteration when it was stopped."""
    worker = Worker.parse(name)
    books.hear(StepUndone(worker, iteration, [Span(f"{worker.stage}F{n}@0", *times) for n, times in enumerate(times_us)]))


def of(written, kind):
    return [event for event in written if isinstance(event, kind)]


def spells(written):
    return [(spell.start_us, spell.end_us, spell.state, spell.cause) for spell in of(written, Spell)]


def steps(written):
    return [(event.iteration, event.loss) for event in written if isinstance(event, Stepped)]


def ops(written, iteration):
    return [event.worker for event in written if isinstance(event, OpRan) and event.iteration == iteration]


def test_an_iteration_is_written_down_when_the_last_worker_has_told_of_it():
    books, written = open_books()
    hear(books, NAMES[1:], 0)
    assert (written, books.num_steps) == ([], 0)
    assert books.is_open(applied("W0_1", 0))
    hear(books, NAMES[:1], 0)
    assert [type(event) for event in written] == [*[OpRan] * 4, Spell, Spell, Stepped]
    assert (steps(written), books.num_steps) == ([(0, 1.0)], 1)
    assert not books.is_open(applied("W0_1", 0))


def test_what_is_told_twice_is_written_down_once():
    books, written = open_books()
    hear(books, [*NAMES, *NAMES], 0)
    hear(books, ["W0_0", "W0_0", *NAMES[1:]], 1)
    assert steps(written) == [(0, 1.0), (1, 1.0)]
    assert ops(written, 1) == NAMES


def test_a_fast_worker_may_be_an_iteration_ahead():
    books, written = open_books()
    hear(books, NAMES[:2], 0)
    hear(books, NAMES[:2], 1)
    hear(books, NAMES[2:], 0)
    assert steps(written) == [(0, 1.0)]
    hear(books, NAMES[2:], 1)
    assert steps(written) == [(0, 1.0), (1, 1.0)]


# From one epoch to the next.


@pytest.mark.parametrize("told_before", [[], ["W0_0"], ["W1_1"], ["W0_1", "W1_1"], SURVIVORS])
def test_the_survivors_words_are_enough_for_what_was_settled_after_a_death(told_before):
    books, written = open_books()
    hear(books, told_before, 0)
    began(books, plan("W1_1"), 1, SURVIVORS)
    hear(books, [name for name in SURVIVORS if name not in told_before], 0)
    assert steps(written) == [(0, 1.0)]
    assert ops(written, 0) == sorted({*SURVIVORS, *told_before})
    hear(books, SURVIVORS, 1)
    assert steps(written) == [(0, 1.0), (1, 1.0)]


@pytest.mark.parametrize("told_before", [[], ["W0_1"]])
def test_who_is_new_is_not_waited_for_to_tell_of_what_was_before_it(told_before):
    # W1_1 was killed, and another process took its seat before training went on.
    books, written = open_books()
    hear(books, told_before, 0)
    began(books, plan(), 1, SURVIVORS)
    hear(books, [name for name in SURVIVORS if name not in told_before], 0)
    assert steps(written) == [(0, 1.0)]
    hear(books, NAMES, 1)
    assert steps(written) == [(0, 1.0), (1, 1.0)]


def test_an_iteration_counts_with_the_plan_by_which_it_was_played():
    books, written = open_books()
    hear(books, NAMES, 0)
    began(books, plan("W1_1"), 2, SURVIVORS)
    hear(books, SURVIVORS, 1)
    hear(books, SURVIVORS, 2)
    assert [event.num_live for event in written if isinstance(event, Spell) and event.state == "train"] == [4, 4, 3]


def test_an_iteration_that_is_done_again_is_told_of_anew():
    books, written = open_books()
    hear(books, NAMES, 0)
    hear(books, ["W0_0", "W0_1"], 1, loss=7.0)
    began(books, plan("W1_1"), 1, SURVIVORS)
    assert not books.is_open(applied("W0_0", 1))
    hear(books, SURVIVORS, 1, loss=2.0)
    assert steps(written) == [(0, 1.0), (1, 2.0)]


def test_steps_behind_a_checkpoint_that_all_load_are_done_again():
    books, written = open_books()
    for iteration in range(3):
        hear(books, NAMES, iteration)
    began(books, plan("W1_1"), 1, [])
    assert books.num_steps == 1
    hear(books, SURVIVORS, 1, loss=2.0)
    assert steps(written) == [(0, 1.0), (1, 1.0), (2, 1.0), (1, 2.0)]
    assert books.trained(2, {}).losses == (1.0, 2.0)


def test_what_was_undone_is_written_down_as_in_vain():
    books, written = open_books()
    books.hear(StepUndone(Worker.parse("W1_0"), 3, [Span("0F0@1", 10, 20), Span("0F1@1", 20, 30, True)]))
    assert written == [OpRan(3, "W1_0", "0F0@1", 10, 20, True), OpRan(3, "W1_0", "0F1@1", 20, 30, True)]
    assert not books.is_open(StepUndone(Worker.parse("W1_0"), 3, []))


def test_a_recovery_leaves_no_gap_and_counts_for_no_iterations_time():
    books, written = open_books()
    hear(books, NAMES, 0)
    undo(books, "W0_0", 1, (160, 185), (185, 188))
    began(books, plan("W1_1"), 1, SURVIVORS)
    event = Recovered(190, 200, 2, ("W1_1",), False, "killed", 1, detect_us=1, abort_us=2, plan_us=3, regroup_us=4)
    books.recovered(event)
    hear(books, SURVIVORS, 1)
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
    assert books.trained(2, {}).iteration_us == 50
    assert books.trained(2, {}).recoveries == (replace(event, redo_us=40, redone_ops=2),)


def test_the_time_of_a_step_that_ended_after_a_failure_is_its_own():
    books, written = open_books()
    hear(books, NAMES, 0)  # it ended at 150, and was settled
    began(books, plan("W1_1"), 1, SURVIVORS)
    books.recovered(Recovered(140, 180, 2, ("W1_1",), False, "killed", 1, detect_us=5, abort_us=10, regroup_us=25))
    assert spells(written)[-3:] == [(100, 150, "train", ""), (150, 155, "pause", "abort"), (155, 180, "pause", "regroup")]


def test_a_death_in_the_first_step_is_no_part_of_the_start():
    books, written = open_books()
    undo(books, "W0_0", 0, (60, 80))
    began(books, plan("W1_1"), 0, SURVIVORS)
    books.recovered(Recovered(85, 90, 2, ("W1_1",), False, "killed", 0, regroup_us=5))
    hear(books, SURVIVORS, 0)
    assert spells(written) == [
        (0, 60, "pause", "start"),
        (60, 85, "redo", "failure"),
        (85, 90, "pause", "regroup"),
        (90, 150, "train", ""),
    ]
    trained = books.trained(1, {})
    assert (trained.start_us, trained.iteration_us) == (60, 60)
    assert [(one.redo_us, one.redone_ops) for one in trained.recoveries] == [(25, 1)]


# Somebody joins: all pause after the same step.


def test_a_warm_up_that_was_played_before_a_pause_is_done_again_and_its_time_is_told():
    books, written = open_books()
    hear(books, NAMES, 0)  # the last stage stepped at 150; the first one went on with its warm-up meanwhile
    undo(books, "W0_0", 1, (140, 148), (150, 156))
    undo(books, "W1_0", 1, (141, 149))
    began(books, plan(), 1, NAMES)
    books.recovered(Recovered(170, 200, 2, ("W1_1",), True, "it asked to join", 1, regroup_us=30))
    (told,) = books.trained(1, {}).recoveries
    assert (told.redone_ops, told.redo_us) == (3, 16)
    assert (told.at_us, told.abort_us, told.regroup_us, told.end_us) == (156, 14, 30, 200)
    assert spells(written)[-3:] == [(150, 156, "redo", "join"), (156, 170, "pause", "abort"), (170, 200, "pause", "regroup")]


def test_without_a_warm_up_nothing_is_done_again_after_a_pause():
    books, written = open_books()
    hear(books, NAMES, 0)
    began(books, plan(), 1, NAMES)
    books.recovered(Recovered(170, 200, 2, ("W1_1",), True, "it asked to join", 1, regroup_us=30))
    (told,) = books.trained(1, {}).recoveries
    assert (told.redone_ops, told.redo_us, told.abort_us) == (0, 0, 20)
    assert spells(written)[-2:] == [(150, 170, "pause", "abort"), (170, 200, "pause", "regroup")]


def test_what_was_undone_of_the_new_epoch_is_told_with_the_next_recovery():
    books, _ = open_books()
    hear(books, NAMES, 0)
    began(books, plan("W1_1"), 1, SURVIVORS)
    undo(books, "W0_0", 1, (210, 220))
    books.recovered(Recovered(160, 200, 2, ("W1_1",), False, "killed", 1, regroup_us=40))
    books.recovered(Recovered(230, 240, 3, ("W1_0",), False, "killed", 1, regroup_us=10))
    assert [one.redone_ops for one in books.trained(1, {}).recoveries] == [0, 1]


# All go back to a checkpoint.


def test_steps_behind_a_checkpoint_are_told_as_done_again_and_their_samples_count_once():
    books, written = open_books()
    for iteration in range(3):
        hear(books, NAMES, iteration)
    undo(books, "W0_0", 3, (352, 358))
    began(books, plan("W1_1"), 1, [])
    books.recovered(Recovered(360, 400, 2, ("W1_1", "W0_1"), False, "killed", 1, regroup_us=40))
    (told,) = books.trained(1, {}).recoveries
    assert told.redone_ops == 2 * 4 + 1
    assert told.redo_us == 360 - 150
    for iteration in (1, 2, 3):
        for name in SURVIVORS:
            books.hear(applied(name, iteration, later_us=300))
    run = measure(in_hindsight(of(written, Spell), of(written, Stepped | Recovered)))
    assert run.samples == 4 * SAMPLES
    assert run.redone_samples == 2 * SAMPLES + round(SAMPLES / plan("W1_1").num_ops)
    assert run.redo_us == told.redo_us
    assert run.total_us == max(spell.end_us for spell in of(written, Spell))


def test_whoever_takes_the_books_over_knows_that_all_have_gone_back():
    books, written = open_books()
    for iteration in range(3):
        hear(books, NAMES, iteration)
    for told_before in (False, True):
        if told_before:
            began(books, plan("W1_1"), 1, [])
            books.recovered(Recovered(360, 400, 2, ("W1_1",), False, "killed", 1, regroup_us=40))
        others, more = open_books()
        others.restore(list(written))
        others.go_on(plan("W1_1"), 2, 1)
        assert others.num_steps == 1
        for name in SURVIVORS:
            others.hear(applied(name, 1, loss=2.0, later_us=300))
        assert steps(more) == [(1, 2.0)]


def test_whoever_takes_the_books_over_in_an_epoch_that_has_begun_keeps_its_steps():
    books, written = open_books()
    hear(books, NAMES, 0)
    began(books, plan("W1_1"), 1, SURVIVORS)
    books.recovered(Recovered(160, 170, 2, ("W1_1",), False, "killed", 1, regroup_us=10))
    hear(books, SURVIVORS, 1)
    others, _ = open_books()
    others.restore(written)
    others.go_on(plan("W1_1"), 2, 1)
    assert others.num_steps == 2


def test_whoever_takes_the_books_over_goes_on_as_if_they_had_been_its_own():
    books, written = open_books()
    hear(books, NAMES, 0)
    undo(books, "W0_0", 1, (151, 160))
    books.recovered(Recovered(170, 190, 1, ("W1_1",), False, "killed", 1, regroup_us=20))
    begun_again = applied("W1_1", 1, loss=math.nan)
    books.hear(replace(begun_again, spans=[Span("1F0@0", 195, 199, True), *begun_again.spans]))
    hear(books, NAMES[:3], 1)
    books.warn("it is slow")
    event = Recovered(260, 290, 2, ("W1_1",), False, "killed", 2)
    books.recovered(event)
    undo(books, "W0_0", 2, (300, 310))
    before = list(written)
    others, more = open_books()
    others.restore(before)
    for each, told in ((books, written), (others, more)):
        began(each, plan("W1_1"), 2, SURVIVORS)
        each.recovered(Recovered(315, 340, 3, ("W1_0",), False, "killed", 2))
        hear(each, SURVIVORS, 2)
        assert told[-1] == written[-1]
    assert others.trained(3, {}).num_begun_again == 1
    assert others.trained(3, {}).recoveries[-1].redone_ops == 1
    assert more == written[len(before) :]
    assert repr(others.trained(3, {})) == repr(books.trained(3, {}))
    assert [warned.text for warned in before if isinstance(warned, Warned)] == ["it is slow"]
