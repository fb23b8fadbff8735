"""ReCycle in the simulator: nothing lost, nothing counted twice, and never faster than the workers that are there."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.core.cluster import Shape, Worker
from recycle.core.events.record import Spell
from recycle.core.events.trace import Change, Trace
from recycle.sim.campaign.trace_simulation import simulate_trace
from recycle.sim.iteration_times import IterationTimes, one_f_one_b_time
from recycle.sim.policy import Loss, Members, MembershipChange
from recycle.sim.systems.baselines import Ideal
from recycle.sim.systems.constants import RecycleConstants
from recycle.sim.systems.recycle import Recycle
from tests.sim.jobs import small_job, traces

JOB = small_job()
TIMINGS = IterationTimes(JOB.problem())
BASE = one_f_one_b_time(JOB.problem())


def recycle(moves=True, **costs):
    return Recycle(JOB, TIMINGS, RecycleConstants(moves=moves, **costs))


def members(*dead):
    return Members(JOB.shape, frozenset(JOB.shape.workers()) - set(dead))


def spells(system, trace):
    return [event for event in simulate_trace(system, trace, JOB.shape) if isinstance(event, Spell)]


@settings(deadline=None, max_examples=60)
@given(traces(JOB.shape), st.booleans())
def test_no_sample_is_lost_or_counted_twice_whatever_the_trace(trace, moves):
    found = spells(recycle(moves), trace)
    done = sum(spell.samples for spell in found)
    assert done % JOB.samples_per_step == 0  # only whole steps are applied, each once
    assert not [spell for spell in found if spell.cause == "dropped"]
    assert sum(spell.length_us for spell in found) == trace.end_us
    # What is applied took at least as long as the fastest plan needs for it, and time is not used twice.
    fastest = JOB.scaled_us(TIMINGS.fault_free().period_us)
    assert done // JOB.samples_per_step * fastest <= sum(spell.length_us for spell in found if spell.state == "train")


@settings(deadline=None, max_examples=60)
@given(traces(JOB.shape), st.booleans())
def test_it_is_never_faster_than_the_ideal(trace, moves):
    ours = sum(spell.samples for spell in spells(recycle(moves), trace))
    best = sum(spell.samples for spell in spells(Ideal(JOB, BASE), trace))
    # The ideal finishes its steps at other times, so that the last one may just have missed the end.
    assert ours <= best + JOB.samples_per_step


def test_a_failure_costs_detection_regrouping_and_the_iteration_in_flight():
    system = recycle(detect_us=3, abort_us=5, regroup_us=7, plan_us=11)
    first = system.begin(members())
    decision = system.change(MembershipChange(0, members(Worker(1, 0)), left=(Worker(1, 0),)), first.state)
    assert decision.loses is Loss.STEP
    assert [(pause.cause, pause.time_us) for pause in decision.pauses[:4]] == [
        ("detect", 3),
        ("abort", 5),
        ("regroup", 7),
        ("plan", 11),
    ]
    assert decision.steady_state.samples == first.steady_state.samples
    assert decision.steady_state.step_us > first.steady_state.step_us


def test_a_worker_that_joins_loses_nothing_but_the_time_of_its_copy():
    system = recycle()
    first = system.begin(members(Worker(1, 0)))
    decision = system.change(MembershipChange(0, members(), joined=(Worker(1, 0),)), first.state)
    assert decision.loses is Loss.NOTHING
    assert "transfer" in {pause.cause for pause in decision.pauses}
    assert decision.steady_state == system.begin(members()).steady_state


def test_workers_move_so_that_failures_lie_where_they_hurt_least():
    dead = (Worker(0, 0), Worker(1, 0))
    moving, staying = recycle(moves=True), recycle(moves=False)
    event = MembershipChange(0, members(*dead), left=dead)
    with_moves = moving.change(event, moving.begin(members()).state)
    without = staying.change(event, staying.begin(members()).state)
    assert with_moves.steady_state.step_us < without.steady_state.step_us
    assert "transfer" in {pause.cause for pause in with_moves.pauses}
    assert "transfer" not in {pause.cause for pause in without.pauses}


def test_who_moved_is_remembered_when_it_dies_later():
    system = recycle()
    dead = (Worker(0, 0), Worker(1, 0))
    state = system.change(MembershipChange(0, members(*dead), left=dead), system.begin(members()).state).state
    mover = next(worker for worker, stage in state.stage_of.items() if stage != worker.stage)
    after = system.change(MembershipChange(1, members(*dead, mover), left=(mover,)), state)
    assert mover not in after.state.stage_of
    assert len(after.state.stage_of) == JOB.num_nodes - 3
    assert min(after.state.counts(JOB.shape.num_stages)) >= 1


def test_a_stage_without_workers_is_loaded_from_a_checkpoint_by_one_that_moves_there():
    dead = tuple(Worker(pipeline, 0) for pipeline in range(3))
    system = recycle()
    decision = system.change(MembershipChange(0, members(*dead), left=dead), system.begin(members()).state)
    assert decision.loses is Loss.SINCE_CHECKPOINT
    assert not decision.steady_state.is_down
    assert "restart" in {pause.cause for pause in decision.pauses}


def test_where_nobody_may_move_the_job_waits_and_goes_on_from_the_checkpoint_when_a_node_comes():
    dead = tuple(Worker(pipeline, 0) for pipeline in range(3))
    system = recycle(moves=False)
    down = system.change(MembershipChange(0, members(*dead), left=dead), system.begin(members()).state)
    assert down.steady_state.is_down
    assert "stage 0" in down.reason
    back = system.change(MembershipChange(1, members(*dead[1:]), joined=dead[:1]), down.state)
    assert not back.steady_state.is_down
    assert back.loses is Loss.SINCE_CHECKPOINT


def test_fewer_workers_than_stages_is_down_time_and_no_error():
    names = [str(worker) for worker in JOB.shape.workers()]
    start = [Change(0, True, name) for name in names]
    trace = Trace((*start, *(Change(10**7 * (number + 1), False, name) for number, name in enumerate(names))), 10**9)
    found = spells(recycle(), trace)
    assert found[-1].state == "down"
    assert found[-1].num_live == 0


@pytest.mark.parametrize("num_failures", range(5))
def test_a_plan_for_more_failures_is_never_better(num_failures):
    fewer, more = TIMINGS.normalized(num_failures), TIMINGS.normalized(min(4, num_failures + 1))
    assert fewer.period_us <= more.period_us
    assert Shape(3, 2, 4).num_workers - sum(fewer.distribution) >= 2
