"""The ledger of a coordinator that takes over: it goes on where the record of the one before ends."""

import math
from dataclasses import replace

import pytest

from recycle.core.events.op_columns import OpColumns
from recycle.core.events.record import Changed, Placed, Recovered, Stepped, Warned
from recycle.runtime.checkpoint.writer import StageSaved
from tests.runtime.coordinator.ledgers import (
    MEMBERS,
    NAMES,
    SURVIVORS,
    WITHOUT_LAST,
    add,
    applied,
    of,
    open_ledger,
    ops,
    plan,
    report,
    start_epoch,
    steps,
    undo,
)

pytestmark = pytest.mark.timeout(60)


def test_a_restored_ledger_knows_that_all_have_gone_back():
    ledger, written = open_ledger()
    for iteration in range(3):
        report(ledger, NAMES, iteration)
    for reported_before in (False, True):
        if reported_before:
            start_epoch(ledger, plan("W1_1"), 1, [])
            ledger.add_recovery(Recovered(360, 400, 2, ("W1_1",), False, "killed", 1, regroup_us=40))
        other, more = open_ledger()
        other.restore(list(written))
        other.resume_epoch(plan("W1_1"), 2, 1, WITHOUT_LAST, {})
        assert other.num_steps == 1
        for name in SURVIVORS:
            add(other, applied(name, 1, loss=2.0, later_us=300))
        assert steps(more) == [(1, 2.0)]


def test_a_ledger_restored_in_an_epoch_that_has_begun_keeps_its_steps():
    ledger, written = open_ledger()
    report(ledger, NAMES, 0)
    start_epoch(ledger, plan("W1_1"), 1, SURVIVORS)
    ledger.add_recovery(Recovered(160, 170, 2, ("W1_1",), False, "killed", 1, regroup_us=10))
    report(ledger, SURVIVORS, 1)
    other, _ = open_ledger()
    other.restore(written)
    other.resume_epoch(plan("W1_1"), 2, 1, WITHOUT_LAST, {})
    assert other.num_steps == 2


def test_a_restored_ledger_continues_like_the_original():
    ledger, written = open_ledger()
    report(ledger, NAMES, 0)
    undo(ledger, "W0_0", 1, (151, 160))
    ledger.add_recovery(Recovered(170, 190, 1, ("W1_1",), False, "killed", 1, regroup_us=20))
    begun_again = applied("W1_1", 1, loss=math.nan)
    add(ledger, replace(begun_again, ran=OpColumns.of([("1F0@0", 195, 199, True), *begun_again.ran.ran()])))
    report(ledger, NAMES[:3], 1)
    ledger.warn("it is slow")
    event = Recovered(260, 290, 2, ("W1_1",), False, "killed", 2)
    ledger.add_recovery(event)
    undo(ledger, "W0_0", 2, (300, 310))
    before = list(written)
    other, more = open_ledger()
    other.restore(before)
    for each, events in ((ledger, written), (other, more)):
        start_epoch(each, plan("W1_1"), 2, SURVIVORS)
        each.add_recovery(Recovered(315, 340, 3, ("W1_0",), False, "killed", 2))
        report(each, SURVIVORS, 2)
        assert events[-1] == written[-1]
    assert other.summary(3, {}).num_begun_again == 1
    assert other.summary(3, {}).recoveries[-1].redone_ops == 1
    assert more == written[len(before) :]
    assert repr(other.summary(3, {})) == repr(ledger.summary(3, {}))
    assert [warned.text for warned in before if isinstance(warned, Warned)] == ["it is slow"]


def test_a_restored_ledger_does_not_write_undone_ops_again():
    ledger, written = open_ledger()
    undo(ledger, "W0_0", 0, (100, 120), (120, 140))
    other, again = open_ledger()
    other.restore(written)
    undo(other, "W0_0", 0, (100, 120), (120, 140))  # the worker's report was not acknowledged
    undo(other, "W0_1", 0, (130, 150))
    assert ops(again, 0) == ["W0_1"]


def test_a_restored_ledger_writes_who_joined_in_an_epoch_of_which_it_knows_nothing():
    ledger, written = open_ledger()
    report(ledger, NAMES, 0)
    ledger.membership_changed("W1_1", False, 3)
    other, again = open_ledger()
    other.restore(written)
    other.resume_epoch(plan(), 3, 1, MEMBERS, {})
    assert [(event.node, event.joins, event.num_live) for event in of(again, Changed)] == [("W1_1", True, 4)]
    third, nothing = open_ledger()
    third.restore([*written, *again])
    third.resume_epoch(plan(), 3, 1, MEMBERS, {})
    assert nothing == []


def test_a_recovery_that_a_killed_coordinator_did_not_write_is_written_so_that_the_next_one_keeps_its_steps():
    ledger, written = open_ledger()
    report(ledger, NAMES, 0)
    ledger.membership_changed("W1_1", False, 3)
    start_epoch(ledger, plan("W1_1"), 1, SURVIVORS)
    second, more = open_ledger()
    second.restore(written)
    second.resume_epoch(plan("W1_1"), 2, 1, WITHOUT_LAST, {})
    (recovered,) = of(more, Recovered)
    assert (recovered.epoch, recovered.workers, recovered.iteration, recovered.num_live) == (2, ("W1_1",), 1, 3)
    report(second, SURVIVORS, 1)
    third, nothing = open_ledger()
    third.restore([*written, *more])
    third.resume_epoch(plan("W1_1"), 2, 1, WITHOUT_LAST, {})
    assert (third.num_steps, nothing) == (2, [])


def test_after_a_takeover_a_step_of_the_epoch_before_waits_only_for_those_who_ran_it():
    ledger, written = open_ledger()
    report(ledger, NAMES, 0)
    start_epoch(ledger, plan(), 2, SURVIVORS)  # step 1 is settled only now, and W1_1 is another process from now on
    other, more = open_ledger()
    other.restore(written)
    other.resume_epoch(plan(), 2, 2, MEMBERS, ledger.late_reporters())
    report(other, NAMES, 2)
    assert other.num_steps == 1
    report(other, SURVIVORS, 1)
    assert [iteration for iteration, _ in steps(more)] == [1, 2]


def test_a_step_that_is_not_on_disk_may_be_reported_again_by_those_that_are_left():
    ledger, written = open_ledger()
    report(ledger, NAMES, 0)
    report(ledger, NAMES, 1)
    ledger.written([event for event in written if isinstance(event, Stepped) and event.iteration == 0])
    start_epoch(ledger, plan("W1_1"), 2, SURVIVORS)
    assert ledger.late_reporters() == {1: {0, 1, 2}}
    ledger.written(written)
    assert ledger.late_reporters() == {}


def test_the_process_of_a_place_is_written_once_also_by_a_coordinator_that_takes_over():
    ledger, written = open_ledger()
    for pid in (4711, 4711, 12):
        ledger.processes.place("W1_1", "a 6f0c-boot pid:[4026531836]", pid)
    other, more = open_ledger()
    other.restore(written)
    other.processes.place("W1_1", "a 6f0c-boot pid:[4026531836]", 12)
    other.processes.place("W1_0", "b", 12)
    assert [(event.node, event.host, event.pid) for event in written + more] == [
        ("W1_1", "a", 4711),
        ("W1_1", "a", 12),
        ("W1_0", "b", 12),
    ]
    assert all(isinstance(event, Placed) for event in written + more)


def test_after_a_takeover_a_checkpoint_waits_for_steps_that_nobody_has_reported_again_yet():
    given = []
    ledger, _ = open_ledger(save=given.append)
    ledger.add(0, StageSaved(1, 0, "a file", 1, "a digest"))
    assert given == []
    report(ledger, NAMES, 0)
    assert len(given) == 1
