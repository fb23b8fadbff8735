"""Epochs of records that are small enough to count by hand, and the tables that compare them with a prediction."""

import pytest
from msgspec import structs

from recycle.core.cluster import Worker
from recycle.core.events.record import Event, OpRan, Recovered, Spell, Stepped
from recycle.evaluate.against_simulation.epoch_comparison import (
    Epoch,
    EpochComparison,
    PauseComparison,
    RunComparison,
    StepTimes,
    late_recoveries,
    split_epochs,
)
from recycle.report.record.run_columns import read_run_record
from tests.recovery_records import EPOCHS, START_US, degraded_plan, played, recovery_record, whole_plan

SHAPE = whole_plan().problem.shape


def epochs_of(events: list[Event]) -> list[Epoch]:
    return split_epochs(read_run_record(events), SHAPE)


def test_an_epoch_holds_the_steps_between_two_recoveries() -> None:
    epochs = epochs_of(recovery_record())
    assert [(epoch.iterations[0], epoch.iterations[-1] + 1) for epoch in epochs] == list(EPOCHS)
    assert [epoch.recovered.joins if epoch.recovered else None for epoch in epochs] == [None, False, True]
    assert [epoch.dead(SHAPE) for epoch in epochs] == [frozenset(), {Worker(1, 1)}, frozenset()]


def test_steps_take_the_time_since_the_one_before_and_the_first_since_training_went_on() -> None:
    first, second, third = epochs_of(recovery_record())
    assert (first.begin_us, second.begin_us) == (START_US, late_recoveries(read_run_record(recovery_record()))[0].end_us)
    assert first.times_us == third.times_us == [whole_plan().period_us] * 5
    assert second.times_us == [degraded_plan().period_us] * 4


def test_rows_are_what_workers_did_in_order() -> None:
    for epoch, plan in zip(epochs_of(recovery_record()), (whole_plan(), degraded_plan(), whole_plan()), strict=True):
        assert epoch.rows == {row.worker: [slot.op for slot in plan.slots(row)] for row in plan.rows}


def test_ops_are_found_by_their_place_in_a_row() -> None:
    epoch, plan = epochs_of(recovery_record())[1], degraded_plan()
    starts, ends = epoch.spans_us({row.worker: [slot.op for slot in plan.slots(row)] for row in plan.rows})
    planned = [(slot.start_us, slot.end_us) for slot in plan.all_slots()]
    for iteration in range(4):
        at_us = epoch.begin_us + iteration * plan.period_us
        assert [(start - at_us, end - at_us) for start, end in zip(starts[iteration], ends[iteration], strict=True)] == planned


def test_a_reduction_begins_when_the_last_peer_comes_to_it() -> None:
    """W0_0 comes 500 earlier than planned and waits; the step of stage 0 takes 4000 and 4200 on its two workers."""
    events = [
        structs.replace(event, start_us=event.start_us - 500)
        if isinstance(event, OpRan) and (event.worker, event.op) == ("W0_0", "reduce")
        else structs.replace(event, end_us=event.end_us + 200)
        if isinstance(event, OpRan) and (event.worker, event.op) == ("W1_0", "optimizer")
        else event
        for event in recovery_record()
    ]
    epoch, problem = epochs_of(events)[1], degraded_plan().problem
    assert epoch.reduced_us(2).tolist() == [[problem.reduce_us(0), 0]] * 4
    assert epoch.stepped_us(2).tolist() == [[4100, 4000]] * 4


def test_a_step_counts_although_the_dead_worker_did_not_tell_of_it() -> None:
    known = [event for event in recovery_record() if not (isinstance(event, OpRan) and is_last_of_the_dead(event))]
    first = epochs_of(known)[0]
    assert first.iterations == (0, 1, 2, 3, 4)
    assert first.complete.tolist() == [0, 1, 2, 3]
    assert first.times_us == [whole_plan().period_us] * 5


def is_last_of_the_dead(op: OpRan) -> bool:
    return op.worker == "W1_1" and op.iteration == 4


def test_ops_in_vain_count_nowhere() -> None:
    vain = [OpRan(2, "W0_0", "0F0@0", START_US + 10, START_US + 20, True)]
    assert [epoch.times_us for epoch in epochs_of([*recovery_record(), *vain])] == [
        epoch.times_us for epoch in epochs_of(recovery_record())
    ]


def test_steps_that_a_checkpoint_threw_away_count_in_both_epochs() -> None:
    ran, _, end_us = played(whole_plan(), 0, 5, 0)
    back = Recovered(end_us, end_us + 700, 2, ("W1_1",), False, "its connection closed", 2, regroup_us=700)
    again, stepped, _ = played(degraded_plan(), 2, 6, back.end_us)
    first, second = epochs_of([*ran, back, *again, *stepped])
    assert first.iterations == (0, 1, 2, 3, 4)
    assert second.iterations == (2, 3, 4, 5)
    assert second.times_us == [degraded_plan().period_us] * 4


def test_a_run_that_was_started_again_has_another_epoch() -> None:
    first, _, end_us = played(whole_plan(), 0, 3, START_US)
    second, _, _ = played(whole_plan(), 3, 5, end_us + 9000)
    starts = [Spell(0, START_US, "pause", "start"), Spell(end_us, end_us + 9000, "pause", "start")]
    assert [epoch.times_us for epoch in epochs_of([starts[0], *first, starts[1], *second])] == [
        [whole_plan().period_us] * 3,
        [whole_plan().period_us] * 2,
    ]


def test_an_epoch_without_a_complete_iteration_is_left_out() -> None:
    ran, _, end_us = played(whole_plan(), 0, 3, 0)
    lost = [Recovered(end_us + 10 * n, end_us + 10 * n + 5, n, ("W1_1",), False, "dead", 3, regroup_us=5) for n in (1, 2)]
    begun = OpRan(3, "W0_0", "0F0@0", end_us + 16, end_us + 17)
    known = read_run_record([*ran, *lost, begun])
    assert [epoch.iterations for epoch in split_epochs(known, SHAPE)] == [(0, 1, 2)]
    assert late_recoveries(known) == lost
    assert epochs_of([begun, Stepped(3, end_us + 17, 1.0, 1.0, 1.0)]) == []
    assert epochs_of([]) == []


def recovered(**others: object) -> Recovered:
    one = Recovered(1_000_000, 1_120_000, 2, ("W1_1",), False, "its connection closed", 4, 20_000, 30_000, 0, 70_000, 0, 50_000)
    return structs.replace(one, **others)  # type: ignore[arg-type]


COMPARED = RunComparison(
    (
        EpochComparison(
            1, 4, (), True, StepTimes.of([110_000, 100_000, 100_000, 100_000]), StepTimes.of([300_000, 120_000, 130_000, 110_000])
        ),
        EpochComparison(5, 5, (Worker(1, 1),), False, StepTimes.of([150_000]), StepTimes.of([180_000])),
    ),
    (PauseComparison(recovered(), {"detect": 1_000_000, "abort": 0, "plan": 0, "regroup": 200_000}),),
    redo_us=50_000,
)


def test_the_first_step_is_compared_by_itself() -> None:
    assert StepTimes.of([300, 120, 130, 110]) == StepTimes(300, 120, 660)
    assert StepTimes.of([300]) == StepTimes(300, None, 300)
    assert [one.ratio for one in COMPARED.epochs] == [1.2, 1.2]


def test_what_is_done_again_counts_on_both_sides_and_in_no_pause() -> None:
    assert COMPARED.pauses[0].measured_us == 120_000
    assert COMPARED.training_us == (560_000, 840_000)
    assert COMPARED.pauses_us == (1_200_000, 120_000)
    assert COMPARED.total_us == (560_000 + 1_200_000 + 50_000, 840_000 + 120_000 + 50_000)


def test_the_measured_parts_are_medians_over_those_who_left() -> None:
    left = [PauseComparison(recovered(detect_us=time_us)) for time_us in (10, 50, 20)]
    assert RunComparison((), (*left, PauseComparison(recovered(joins=True, detect_us=0)))).measured_parts_us == {
        "detect": 20,
        "abort": 30_000,
        "plan": 0,
        "regroup": 70_000,
    }
    assert RunComparison((), (PauseComparison(recovered(joins=True)),)).measured_parts_us == {}


def test_the_facts_say_all_of_it() -> None:
    facts = COMPARED.to_json()
    assert facts["epochs"][1] == {
        "first_step": 5,
        "last_step": 5,
        "steps": 1,
        "dead": ["W1_1"],
        "planned": False,
        "predicted_us": {"first": 150_000, "iteration": None, "total": 150_000},
        "measured_us": {"first": 180_000, "iteration": None, "total": 180_000},
        "ratio": 1.2,
    }
    assert facts["recoveries"][0]["predicted_us"] == {
        "total": 1_200_000,
        "detect": 1_000_000,
        "abort": 0,
        "plan": 0,
        "regroup": 200_000,
    }
    assert facts["recoveries"][0]["measured_us"]["total"] == 120_000
    assert facts["recoveries"][0]["ratio"] == 0.1
    assert facts["total_us"] == {"predicted": 1_810_000, "measured": 1_010_000, "ratio": pytest.approx(0.558011)}


TABLES = """\
simulation steps    dead  iteration simulated   measured  ratio  first step simulated   measured  ratio
           1-4    nobody            100.00 ms  120.00 ms  1.200             110.00 ms  300.00 ms  2.727
           5        W1_1                    -          -      -             150.00 ms  180.00 ms  1.200
           op times and their variation are those of these steps, by stage and kind: where there are fewer cores than workers,
           workers slow each other down, which no profile knows; the first step has an empty pipeline, and warms up
           steps 5: not a plan that the planner makes on the spot; it is simulated as recorded

           pause      step  simulated  measured  ratio
           W1_1 left     5    1200 ms    120 ms  0.100
           simulated pauses are assumptions; this run's pauses, for here and for 'recycle simulate', are
             --set recycle.detect=20ms --set recycle.abort=30ms --set recycle.plan=0ms --set recycle.regroup=70ms

                     simulated  measured  ratio
           steps        560 ms    840 ms  1.500
           pauses      1200 ms    120 ms  0.100
           repeated      50 ms     50 ms  1.000
           total       1810 ms   1010 ms  0.558"""


def test_people_read_the_same_in_tables() -> None:
    assert COMPARED.lines() == TABLES.splitlines()


def test_many_recoveries_are_cut_short_and_what_was_not_predicted_has_no_ratio() -> None:
    lines = RunComparison(COMPARED.epochs, (PauseComparison(recovered()),) * 30).lines()
    assert sum("W1_1 left" in line for line in lines) == 24
    assert "           and 6 more; --json lists all" in lines
    assert "           W1_1 left     5       0 ms    120 ms      -" in lines
