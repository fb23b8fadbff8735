"""Slow workers and links: how long a step is, who waits, who plans again, and when."""

from dataclasses import replace

import pytest

from recycle.core.cluster import Shape, Worker
from recycle.core.events.record import Spell
from recycle.core.events.trace import Change, Slowdown, Trace
from recycle.sim.campaign.trace_simulation import simulate_trace
from recycle.sim.iteration_times import IterationTimes
from recycle.sim.job import SimulatedJob
from recycle.sim.one_f_one_b import pipeline_us
from recycle.sim.policy import Members, SteadyState
from recycle.sim.systems.constants import Constants, RecycleConstants
from recycle.sim.systems.recycle import Recycle
from recycle.sim.systems.registry import SYSTEMS, SystemContext
from recycle.sim.systems.slow_steps import link_delay_us, stretched
from tests.sim.quick_plans import plan_quickly

SECOND = 1_000_000
JOB = SimulatedJob.of("layers=8,hidden=2048,heads=16,sequence=2048,vocabulary=1", "a100-80", Shape(2, 4, 16), scale=4.0)
CUTS = IterationTimes(JOB.problem(shared_layers=1))
SLOW = Worker(1, 2)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    plan_quickly(monkeypatch)


def members(slow=(), links=()):
    return Members(JOB.shape, frozenset(JOB.shape.workers()), 0, tuple(slow), tuple(links))


def trace(*slowdowns, end_s=600):
    return Trace(tuple(Change(0, True, str(worker)) for worker in JOB.shape.workers()), end_s * SECOND, slowdowns)


def test_a_slow_worker_lengthens_1f1b_by_what_its_own_work_is_longer():
    """Equal stages: the pipeline of the slow worker takes one slot of the others, and all micro-batches at the slow stage."""
    profile = JOB.profile()
    stage = profile.stages[1]
    usual = pipeline_us(profile, 16)
    slot = stage.forward_us + stage.fused_us
    slowed = replace(stage, forward_us=2 * stage.forward_us, input_us=2 * stage.input_us, fused_us=2 * stage.fused_us)
    exact = pipeline_us(replace(profile, stages=(profile.stages[0], slowed, *profile.stages[2:])), 16)
    steady = SteadyState(usual, 1, 16 * slot / usual)
    assert stretched(JOB, steady, members([(SLOW, 0.5)])).step_us == pytest.approx(exact, rel=0.002)


def test_steps_wait_for_the_slowest_worker_only_and_speeds_that_a_plan_knows_cost_nothing():
    steady = SteadyState(1000, 8, 0.5)
    assert stretched(JOB, steady, members([(SLOW, 0.5), (Worker(0, 0), 0.8)])).step_us == 1500
    assert stretched(JOB, steady, members([(SLOW, 0.5)]), {SLOW: 0.5}) == steady
    assert stretched(JOB, steady, members([(SLOW, 0.5)]), {SLOW: 0.8}).step_us == 1300
    assert stretched(JOB, steady, members(), {SLOW: 0.5}) == steady  # a worker that is faster than planned waits


def test_a_slow_link_lengthens_the_reduction_of_its_stage_and_one_round_of_messages():
    profile = JOB.profile()
    usual = profile.reduce_us(2, 2) + 2 * profile.comm_us(2)
    assert link_delay_us(JOB, members(links=[(SLOW, 0.5)])) == pytest.approx(4.0 * usual)
    assert link_delay_us(JOB, members(links=[(SLOW, 0.25)])) == pytest.approx(4.0 * usual * 3)


WAITING = [name for name in SYSTEMS if name not in ("recycle", "resihp", "ideal", "fault-scaled", "bamboo")]


@pytest.mark.parametrize("name", WAITING)
def test_systems_without_an_answer_wait_and_are_as_before_when_it_is_over(name, tmp_path):
    system = SYSTEMS[name](SystemContext(JOB, Constants.for_model(1e9), tmp_path))
    quiet, slow, over = (
        simulate_trace(system, given, JOB.shape)
        for given in (
            trace(),
            trace(Slowdown(0, 601 * SECOND, str(SLOW), 0.5)),
            trace(Slowdown(0, 300 * SECOND, str(SLOW), 0.5)),
        )
    )
    done = [sum(event.samples for event in record if isinstance(event, Spell)) for record in (quiet, slow, over)]
    assert done[1] < done[2] < done[0]
    assert done[2] == pytest.approx((done[0] + done[1]) / 2, abs=3 * JOB.samples_per_step)


def recycle(**costs):
    return Recycle(JOB, CUTS, RecycleConstants(**costs))


def test_recycle_waits_until_it_notices_and_then_runs_a_plan_for_the_speeds():
    system = recycle(notice_steps=5)
    first = system.begin(members()).steady_state
    known = CUTS.for_distribution((0,) * 4, ((), (), (0.5,), ())).period_us * 4
    waiting_us = round(first.step_us * (1 + first.busy_share))
    assert known < waiting_us * 0.8
    record = simulate_trace(system, trace(Slowdown(60 * SECOND, 1200 * SECOND, str(SLOW), 0.5)), JOB.shape)
    done = sum(event.samples for event in record if isinstance(event, Spell)) / JOB.samples_per_step
    paused_us = sum(event.length_us for event in record if isinstance(event, Spell) and event.state == "pause")
    # A minute of the first plan, five steps that wait, the pause, and the rest by the new plan.
    rest_us = 600 * SECOND - 60 * SECOND - 5 * waiting_us - paused_us
    assert done == pytest.approx(60 * SECOND / first.step_us + 5 + rest_us / known, abs=2)
    assert 0 < paused_us < 2 * SECOND


def test_recycle_goes_back_to_its_first_plan_when_the_worker_is_fast_again():
    system = recycle(notice_steps=5)
    slow = Slowdown(60 * SECOND, 120 * SECOND, str(SLOW), 0.5)
    long = simulate_trace(system, trace(slow, end_s=3600), JOB.shape)
    done = sum(event.samples for event in long if isinstance(event, Spell)) / JOB.samples_per_step
    first = system.begin(members()).steady_state
    lost_us = 3600 * SECOND - done * first.step_us
    assert 0 < lost_us < 60 * SECOND  # less than if the slow minute were lost


def test_recycle_does_not_plan_again_for_a_worker_that_is_slow_for_less_than_it_takes_to_notice():
    system = recycle(notice_steps=1000)
    record = simulate_trace(system, trace(Slowdown(60 * SECOND, 90 * SECOND, str(SLOW), 0.5)), JOB.shape)
    assert {event.state for event in record if isinstance(event, Spell)} == {"train"}


def test_recycle_leaves_out_a_worker_whose_link_is_far_too_slow_and_takes_it_back():
    system = recycle(notice_steps=5)
    slow = Slowdown(60 * SECOND, 1200 * SECOND, str(SLOW), 0.002, is_link=True)
    record = simulate_trace(system, trace(slow, end_s=2400), JOB.shape)
    causes = {event.cause for event in record if isinstance(event, Spell) and event.state == "pause"}
    assert {"regroup", "plan", "transfer"} <= causes
    done = sum(event.samples for event in record if isinstance(event, Spell)) / JOB.samples_per_step
    dead = CUTS.normalized(1).period_us * 4
    first = system.begin(members()).steady_state.step_us
    # Five steps wait for the link before it is noticed.
    assert done >= 0.9 * (1260 * SECOND / first + 1140 * SECOND / dead)


def test_recycle_leaves_out_a_worker_that_computes_far_too_slowly():
    system = recycle(notice_steps=5)
    slow = system.begin(members(slow=[(SLOW, 0.02)]))
    assert slow.state.left_out == {SLOW}
    assert slow.steady_state.step_us == JOB.scaled_us(CUTS.normalized(1).period_us)
    record = simulate_trace(system, trace(Slowdown(60 * SECOND, 1200 * SECOND, str(SLOW), 0.02), end_s=2400), JOB.shape)
    done = sum(event.samples for event in record if isinstance(event, Spell)) / JOB.samples_per_step
    first = system.begin(members()).steady_state.step_us
    # Five steps wait before the worker is known to be slow, a step of it takes as long as fifty.
    assert done >= 0.9 * (1260 * SECOND / first + (1140 * SECOND - 5 * 50 * first) / slow.steady_state.step_us)
    assert system.begin(members(slow=[(SLOW, 0.9)])).state.left_out == frozenset()
