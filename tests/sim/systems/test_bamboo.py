"""Bamboo: what redundancy costs in time and memory, which worker takes over, and when pipelines are formed again."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.core.cluster import Shape, Worker
from recycle.core.events.record import Spell
from recycle.core.events.trace import Change, Trace
from recycle.core.profile import Link, Profile, StageProfile
from recycle.sim import failure_traces as failures
from recycle.sim.campaign.placement import Placement, membership_changes
from recycle.sim.campaign.trace_simulation import simulate_trace
from recycle.sim.iteration_times import one_f_one_b_time
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import Loss, Members
from recycle.sim.systems.bamboo import Bamboo, step_time_us, take_over, wants_rebalance
from recycle.sim.systems.baselines import Ideal
from tests.sim.jobs import SMALL, small_job, traces

SECOND, HOUR = 1_000_000, 3_600_000_000
REBALANCE_US, FATAL_US = 100 * SECOND, 30 * SECOND


def bamboo(job, depth=None):
    return Bamboo(job, REBALANCE_US, FATAL_US, depth)


def after(system, *groups):
    """The decisions of a system that loses (`-W0_1`) and gets (`+W0_1`) nodes, a group at a time; first that of its start."""
    shape = system.job.shape
    places = Placement(shape)
    decisions = [system.begin(places.change(0, (), map(str, shape.workers())).members)]
    for number, group in enumerate(groups, start=1):
        words = group.split()
        leaving, joining = ([word[1:] for word in words if word[0] == sign] for sign in "-+")
        decisions.append(system.change(places.change(number, leaving, joining), decisions[-1].state))
    return decisions


def counts(decision):
    """Pipelines, workers that hold two stages, spares."""
    layout = decision.state
    return len(layout.pipelines), layout.num_overloaded, len(layout.spares)


def causes(decision):
    return [pause.cause for pause in decision.pauses]


# Time


def test_redundant_forwards_lengthen_the_step_by_what_no_bubble_hides():
    # F 10, B 20, 13 micro-batches, 3 stages: 1F1B takes 15 * 30. Everybody has 130 of redundant work; worker 0 waits for two
    # later stages (60), worker 1 for one (30), worker 2 for two forwards before its first (20): 110 do not fit there.
    assert step_time_us(Profile.uniform(3, 10, 10, 10), 13, 1) == 450 + 110


def test_redundant_forwards_cost_nothing_where_bubbles_are_long_enough():
    # Two micro-batches, 4 stages: 20 of work, and the shortest bubbles are 30. 1F1B takes 5 * 30.
    assert step_time_us(Profile.uniform(4, 10, 10, 10), 2, 1) == 150


def test_a_worker_reduces_and_steps_two_stages():
    # 1F1B takes 6, and hides all redundant work. Reducing 100 bytes over two peers takes 100 µs for each stage; steps of 7 and 9.
    stages = tuple(StageProfile(1, 1, 1, 2, optimizer_us=step, gradient_bytes=100) for step in (7, 9))
    assert step_time_us(Profile(stages, peer_link=Link(0, 1.0)), 1, 2) == 6 + 2 * 100 + 7 + 9


@pytest.mark.parametrize(("num_stages", "depth"), [(1, 2), (2, 3), (3, 5), (4, 6)])
def test_pipelines_are_half_as_deep_again(num_stages, depth):
    assert bamboo(small_job(2, num_stages)).num_stages == depth


def test_pipelines_are_no_deeper_than_the_model_has_layers():
    assert bamboo(small_job(2, 5)).num_stages == 6
    assert bamboo(small_job(2, 5), depth=4).num_stages == 4


# Memory


@pytest.mark.parametrize(
    ("model", "shape", "fits"),
    [
        ("gpt3-medium", Shape(16, 2, 8), True),
        ("gpt3-3.35b", Shape(8, 4, 16), False),
        ("gpt3-6.7b", Shape(4, 8, 32), False),
    ],
)
def test_of_the_published_models_only_the_smallest_fits_in_80_gb(model, shape, fits):
    system = bamboo(SimulatedJob.of(model, "a100-80", shape))
    assert system.is_out_of_memory is not fits
    decision = system.begin(Members(shape, frozenset(shape.workers())))
    assert decision.steady_state.is_down is not fits
    assert ("out of memory" in decision.reason) is not fits


def test_a_gpu_holds_two_stages_and_the_activations_of_both():
    # Three stages of one layer: h 1024, 16 heads, s 2048, no vocabulary to speak of.
    # A layer: 12 h² + 13 h = 12,596,224 parameters of 16 bytes; sbh (34 + 5as/h) * 2 = 813,694,976 bytes of activations.
    # The first worker: 3 micro-batches of its own and 2 of the next stage, two layers, and (1 + 2048) h positions of 16 bytes;
    # the tokens of its 3 micro-batches take 2 * 8 * 2048 bytes each.
    job = SimulatedJob.of("layers=3,hidden=1024,heads=16,vocabulary=1", "a100-80", Shape(2, 3, 8))
    wanted = 5 * 813_694_976 + 2 * 12_596_224 * 16 + 2049 * 1024 * 16 + 3 * 2 * 8 * 2048
    assert bamboo(job, depth=3).memory_bytes == pytest.approx(wanted, rel=1e-6)


def test_a_job_that_is_out_of_memory_stays_down_whatever_happens():
    decisions = after(bamboo(SimulatedJob.of("gpt3-6.7b", "a100-80", Shape(4, 8, 4))), "-W0_0", "-W0_1 -W1_1", "+W0_0")
    assert all(decision.steady_state.is_down and not decision.pauses for decision in decisions)


# Rules


def test_the_predecessor_takes_over():
    assert take_over("abcd", "c") == ("a", "b", "b", "d")
    assert take_over("abcd", "a") == ("d", "b", "c", "d")
    assert take_over("aacd", "d") == ("a", "a", "c", "c")


def test_two_neighbours_or_one_with_two_stages_are_a_fatal_loss():
    assert take_over("aacd", "a") is None
    assert take_over("aacd", "c") is None
    assert take_over("a", "a") is None


@pytest.mark.parametrize(
    ("num_pipelines", "num_overloaded", "num_spare", "wanted"),
    [
        (2, 0, 11, False),
        (2, 0, 12, True),  # a third pipeline of 12
        (4, 1, 0, False),  # 2 of 47 are 4.3 %
        (4, 2, 0, True),  # 4 of 46 are 8.7 %
        (4, 1, 1, True),  # a spare for him
        (3, 1, 0, True),  # 2 of 35 are 5.7 %
    ],
)
def test_pipelines_are_formed_again_by_the_three_rules(num_pipelines, num_overloaded, num_spare, wanted):
    assert wants_rebalance(num_pipelines, 12, num_overloaded, num_spare) is wanted


# Events. Five pipelines of two stages are ten nodes: three pipelines of three, W4_1 is spare.


def test_nodes_that_fill_no_pipeline_are_spare():
    (start,) = after(bamboo(small_job(5, 2)))
    assert counts(start) == (3, 0, 1)
    assert start.state.pipelines[0] == (Worker(0, 0), Worker(0, 1), Worker(1, 0))


def test_the_loss_of_a_spare_costs_nothing():
    start, decision = after(bamboo(small_job(5, 2)), "-W4_1")
    assert (decision.loses, decision.pauses, decision.keeps_unfinished) == (Loss.NOTHING, (), True)
    assert decision.steady_state.step_us == start.steady_state.step_us


def test_a_spare_takes_the_place_of_a_lost_worker():
    start, decision = after(bamboo(small_job(5, 2)), "-W0_1")
    assert (decision.loses, causes(decision), sum(pause.time_us for pause in decision.pauses)) == (
        Loss.NOTHING,
        ["rebalance"],
        REBALANCE_US,
    )
    assert counts(decision) == (3, 0, 0)
    assert decision.steady_state.step_us == start.steady_state.step_us


def test_without_a_spare_fewer_pipelines_share_the_batch():
    *_, decision = after(bamboo(small_job(5, 2)), "-W0_1", "-W3_0")
    assert causes(decision) == ["rebalance"]
    assert counts(decision) == (2, 0, 2)


def test_two_neighbours_lost_at_once_are_a_rendezvous():
    _, decision = after(bamboo(small_job(5, 2)), "-W0_0 -W0_1")
    assert (decision.loses, causes(decision), sum(pause.time_us for pause in decision.pauses)) == (
        Loss.STEP,
        ["rendezvous"],
        FATAL_US,
    )
    assert counts(decision) == (2, 0, 2)


def test_a_node_that_completes_a_pipeline_is_worth_a_rebalance_and_no_step():
    *_, two, decision = after(bamboo(small_job(5, 2)), "-W0_1", "-W3_0", "+W3_0")
    assert (decision.loses, causes(decision), counts(decision)) == (Loss.NOTHING, ["rebalance"], (3, 0, 0))
    assert decision.steady_state.step_us < two.steady_state.step_us


def test_a_node_that_completes_none_waits_as_a_spare():
    decision = after(bamboo(small_job(5, 2)), "-W4_1", "+W4_1")[-1]
    assert (decision.pauses, counts(decision)) == ((), (3, 0, 1))


def test_of_many_workers_one_may_hold_two_stages_for_long():
    # 14 pipelines of three, no spare: two stages of 41 workers are 4.9 %.
    start, one, two = after(bamboo(small_job(21, 2, 1)), "-W0_1", "-W9_0")
    assert (one.loses, one.pauses, counts(one)) == (Loss.NOTHING, (), (14, 1, 0))
    assert one.steady_state.step_us == pytest.approx(1.5 * start.steady_state.step_us, rel=1e-5)
    assert (causes(two), counts(two)) == (["rebalance"], (13, 0, 1))


def test_the_loss_of_one_who_took_over_is_fatal():
    # W0_0 holds the stage of W0_1.
    *_, decision = after(bamboo(small_job(21, 2, 1)), "-W0_1", "-W0_0")
    assert (causes(decision), counts(decision)) == (["rendezvous"], (13, 0, 1))


def test_the_last_pipeline_goes_on_with_one_who_holds_two_stages():
    start, one, none, again = after(bamboo(small_job(1, 3), depth=3), "-W0_1", "-W0_2", "+W0_1 +W0_2")
    assert counts(one) == (1, 1, 0)
    assert one.steady_state.step_us == pytest.approx(1.5 * start.steady_state.step_us, rel=1e-5)
    assert none.steady_state.is_down
    assert (causes(again), again.steady_state.step_us) == (["rendezvous"], start.steady_state.step_us)


def test_too_few_nodes_for_a_pipeline_wait():
    # Half as deep again as two stages, on two nodes.
    start, lost, back = after(bamboo(small_job(1, 2)), "-W0_0 -W0_1", "+W0_0")
    assert start.steady_state.is_down
    assert lost.steady_state.is_down
    assert back.steady_state.is_down


def test_a_node_that_is_replaced_at_once_has_lost_its_stage():
    # A node beyond the cluster takes the place of W0_1: it is a spare like any other.
    job = small_job(5, 2)
    names = [*map(str, job.shape.workers()), "further"]
    trace = Trace((*(Change(0, True, name) for name in names), Change(SECOND, False, "W0_1")), 2 * SECOND)
    _, event = membership_changes(trace, job.shape, 0)
    decision = bamboo(job).change(event, after(bamboo(job))[0].state)
    assert (causes(decision), counts(decision)) == (["rebalance"], (3, 0, 1))


def test_a_fail_over_slows_the_rest_of_its_step_and_costs_the_rebalance_after_it():
    job = small_job(5, 2)
    step_us = after(bamboo(job))[0].steady_state.step_us
    into_us = 1000 * (step_us // 2000)
    at_us, slow_us = 10 * step_us + into_us, round(1.5 * (step_us - into_us))
    names = map(str, job.shape.workers())
    trace = Trace((*(Change(0, True, name) for name in names), Change(at_us, False, "W0_1")), at_us + REBALANCE_US + 5 * step_us)
    found = [event for event in simulate_trace(bamboo(job), trace, job.shape) if isinstance(event, Spell)]
    assert [(spell.state, spell.cause, spell.length_us) for spell in found] == [
        ("train", "", 10 * step_us),
        ("train", "", into_us + slow_us),  # with one node fewer
        ("pause", "rebalance", REBALANCE_US),
        ("train", "", 5 * step_us - slow_us),  # the last step does not end
    ]
    assert sum(spell.samples for spell in found) == 15 * 20  # five pipelines of four micro-batches of one sample


def test_a_second_take_over_in_a_step_does_not_slow_it_again():
    # Workers of two pipelines are lost after a quarter and after half of a step: the other three quarters take 1.5 times as long.
    job = small_job(21, 2, 1)
    step_us = after(bamboo(job))[0].steady_state.step_us
    names = map(str, job.shape.workers())
    lost = [Change(step_us // 4, False, "W0_1"), Change(step_us // 2, False, "W9_0")]
    trace = Trace((*(Change(0, True, name) for name in names), *lost), 2 * step_us)
    found = [event for event in simulate_trace(bamboo(job), trace, job.shape) if isinstance(event, Spell)]
    pause_us = next(spell.start_us for spell in found if spell.cause == "rebalance")
    assert pause_us == pytest.approx(step_us * (1 / 4 + 3 / 4 * 1.5), abs=2)


# As a whole


# GPT-3 medium on 32 A100 for six hours, one failure every so often, nobody returns: published samples/s, where fault-free 1F1B
# has 27.58.
@pytest.mark.parametrize(("interval_h", "published"), [(6, 19.47), (2, 18.98), (0.5, 15.24)])
def test_the_published_throughput_is_within_15_per_cent(interval_h, published):
    shape = Shape(16, 2, 8)
    job = SimulatedJob.of("gpt3-medium", "a100-80", shape)
    fault_free_s = one_f_one_b_time(job.problem()).period_us / 1e6
    job = replace(job, scale=shape.num_chains / 27.58 / fault_free_s)
    samples = 0
    for seed in range(10):
        trace = failures.periodic_trace(failures.worker_names(16, 2), round(interval_h * HOUR), 6 * HOUR, seed)
        samples += sum(event.samples for event in simulate_trace(bamboo(job), trace, shape) if isinstance(event, Spell))
    assert samples / 10 / (6 * 3600) == pytest.approx(published, rel=0.15)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_bamboo_is_never_faster_than_the_ideal(data):
    shape = Shape(*(data.draw(st.integers(1, most)) for most in (4, 3, 6)))
    job = SimulatedJob.of(SMALL, "a100-80", shape, scale=10.0)
    peer, ideal = bamboo(job, data.draw(st.none() | st.integers(1, 6))), Ideal(job, one_f_one_b_time(job.problem()))
    events = membership_changes(data.draw(traces(shape)), shape, 0)
    first = next(events)
    mine, best = peer.begin(first.members), ideal.begin(first.members)
    for event in events:
        assert mine.steady_state.samples_per_s <= best.steady_state.samples_per_s * 1.001
        mine, best = peer.change(event, mine.state), ideal.change(event, best.state)
    assert mine.steady_state.samples_per_s <= best.steady_state.samples_per_s * 1.001


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_every_live_node_holds_a_stage_or_is_spare(data):
    job = small_job(5, 2)
    system = bamboo(job)
    events = membership_changes(data.draw(traces(job.shape, most_changes=30)), job.shape, 0)
    decision = system.begin(next(events).members)
    for event in events:
        decision = system.change(event, decision.state)
        assert frozenset(decision.state.nodes) == event.members.live
        assert all(len(pipeline) == 3 for pipeline in decision.state.pipelines)
