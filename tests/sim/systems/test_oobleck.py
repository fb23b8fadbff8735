"""Oobleck: what a failure does to its pipelines, what waits, and what it costs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.core.cluster import Shape, Worker
from recycle.core.errors import UserError
from recycle.core.events.record import Spell
from recycle.core.events.trace import Change, Trace
from recycle.planner.profiles.catalog import ModelSpec, parse_gpu
from recycle.sim.campaign.placement import membership_changes
from recycle.sim.campaign.trace_simulation import simulate_trace
from recycle.sim.fault_free_schedule import FaultFreeSchedule
from recycle.sim.iteration_times import IterationTime
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import DOWN, Loss, Members, MembershipChange, Pause
from recycle.sim.systems.baselines import Ideal
from recycle.sim.systems.oobleck import policy
from recycle.sim.systems.oobleck.policy import Oobleck, OobleckLayout, repair
from tests.sim.jobs import traces

SECOND = 1_000_000
SHAPE = Shape(4, 3, 8)
# A parameter takes 24 bytes by Oobleck's rule: two nodes of this memory hold the 0.11 billion of this model.
MODEL = ModelSpec("small", num_layers=8, hidden=1024, num_heads=16, vocabulary=4096)
JOB = SimulatedJob(MODEL, parse_gpu("a100-80,memory=2GB"), SHAPE)


def nodes(*numbers):
    return tuple(Worker(0, number) for number in numbers)


def members(*failed, shape=SHAPE, num_spare=0):
    return Members(shape, frozenset(shape.workers()) - set(failed), num_spare)


def losing(*failed, after=()):
    """The loss of these places, after that of others."""
    return MembershipChange(0, members(*failed, *after), tuple(failed))


def sizes_of(pipelines):
    return [len(pipeline) for pipeline in pipelines]


@pytest.fixture
def oobleck():
    return Oobleck(JOB, 5 * SECOND, faults=3)


# What a failure does to pipelines, by hand.


def test_a_pipeline_with_enough_nodes_left_just_gets_shorter():
    left = (nodes(0, 1, 2), nodes(4, 5, 6, 7))
    assert repair(left, range(3, 6)) == left


def test_a_pipeline_with_too_few_nodes_borrows_from_the_biggest():
    left = (nodes(0, 1), nodes(3, 4, 5, 6), nodes(7, 8, 9, 10, 11))
    assert repair(left, range(3, 6)) == (nodes(0, 1, 11), nodes(3, 4, 5, 6), nodes(7, 8, 9, 10))


def test_a_pipeline_borrows_as_many_nodes_as_it_lacks():
    assert sizes_of(repair((nodes(0), nodes(3, 4, 5, 6), nodes(7, 8, 9, 10)), range(3, 6))) == [3, 3, 3]


def test_a_pipeline_that_lost_all_its_nodes_is_filled_again():
    assert sizes_of(repair(((), nodes(0, 1, 2)), range(1, 6))) == [1, 2]


def test_a_pipeline_merges_where_nobody_can_spare_a_node():
    assert repair((nodes(0, 1), nodes(3, 4, 5), nodes(6, 7, 8)), range(3, 6)) == (nodes(3, 4, 5, 0, 1), nodes(6, 7, 8))


def test_two_short_pipelines_merge_with_each_other():
    assert repair((nodes(0), nodes(3, 4, 5), nodes(6, 7)), range(3, 6)) == (nodes(0, 6, 7), nodes(3, 4, 5))


def test_what_a_merged_pipeline_cannot_have_is_left_out():
    assert repair((nodes(0, 1), nodes(3, 4, 5)), range(3, 5)) == (nodes(3, 4, 5, 0),)


def test_too_few_nodes_make_no_pipeline():
    assert repair((nodes(0), nodes(3)), range(3, 6)) == ()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_a_repair_keeps_all_nodes_in_pipelines_of_allowed_sizes(left, fewest):
    most = max(2 * fewest - 1, *left)
    numbers = iter(range(100))
    pipelines = tuple(nodes(*(next(numbers) for _ in range(size))) for size in left)
    made = repair(pipelines, range(fewest, most + 1))
    kept = sorted(node for pipeline in made for node in pipeline)
    assert kept == sorted(nodes(*range(sum(left)))) if sum(left) >= fewest else kept == []
    assert all(fewest <= size <= most for size in sizes_of(made))
    assert len(made) <= len(pipelines)


# The system.


def test_all_nodes_begin_in_at_least_four_pipelines(oobleck):
    layout = oobleck.begin(members()).state
    assert len(layout.pipelines) >= 4
    assert sorted(node for pipeline in layout.pipelines for node in pipeline) == sorted(SHAPE.workers())
    assert not layout.waiting


def test_a_failure_shortens_the_pipeline_that_it_hits_and_no_other(oobleck):
    before = OobleckLayout((nodes(0, 1, 2), *((Worker(p, 0), Worker(p, 1), Worker(p, 2)) for p in (1, 2, 3))), frozenset())
    decision = oobleck.change(losing(Worker(0, 1)), before)
    assert decision.state.pipelines == (nodes(0, 2), *before.pipelines[1:])
    assert decision.loses is Loss.STEP
    assert decision.pauses == (Pause("reconfigure", 5 * SECOND),)
    assert decision.steady_state.samples == JOB.samples_per_step
    assert not decision.keeps_unfinished


def test_a_node_that_joins_waits_for_the_next_reconfiguration(oobleck):
    first = oobleck.begin(members())
    fewer = oobleck.change(losing(Worker(0, 0)), first.state)
    joins = MembershipChange(0, members(), joined=(Worker(0, 0),))
    waiting = oobleck.change(joins, fewer.state)
    assert waiting.state == OobleckLayout(fewer.state.pipelines, frozenset({Worker(0, 0)}))
    assert (waiting.pauses, waiting.loses, waiting.keeps_unfinished) == ((), Loss.NOTHING, True)
    assert waiting.steady_state.step_us == fewer.steady_state.step_us
    assert waiting.steady_state.busy_share < fewer.steady_state.busy_share
    used = oobleck.change(losing(Worker(1, 1)), waiting.state)
    assert not used.state.waiting
    assert sum(used.state.sizes) == 11
    assert used.steady_state == oobleck.begin(members(Worker(1, 1))).steady_state


def test_the_loss_of_a_waiting_node_changes_nothing(oobleck):
    first = oobleck.begin(members(Worker(0, 0)))
    waiting = oobleck.change(MembershipChange(0, members(), joined=(Worker(0, 0),)), first.state)
    gone = oobleck.change(losing(Worker(0, 0)), waiting.state)
    assert (gone.steady_state, gone.loses, gone.pauses) == (first.steady_state, Loss.NOTHING, ())
    assert gone.state == first.state


def test_a_spare_that_steps_in_is_used_at_once(oobleck):
    first = oobleck.begin(members(num_spare=1))
    swapped = MembershipChange(0, members(), (Worker(1, 0),), (Worker(1, 0),))
    after = oobleck.change(swapped, first.state)
    assert after.loses is Loss.STEP
    assert sum(after.state.sizes) == 12


def test_too_few_nodes_stop_the_job_until_one_joins(oobleck):
    places = sorted(SHAPE.workers())
    alone = oobleck.change(losing(*places[:-1]), oobleck.begin(members()).state)
    assert alone.steady_state == DOWN
    assert (alone.state.pipelines, alone.state.waiting, alone.pauses) == ((), {places[-1]}, ())
    still = oobleck.change(MembershipChange(0, members(*places), (places[-1],)), alone.state)
    assert still.steady_state == DOWN
    again = oobleck.change(MembershipChange(0, members(*places[2:]), joined=tuple(places[:2])), still.state)
    assert again.state.sizes == (2,)
    assert again.pauses == (Pause("reconfigure", 5 * SECOND),)
    assert not again.steady_state.is_down


def test_a_job_that_no_pipeline_holds_is_down_from_the_start():
    tight = SimulatedJob(MODEL, parse_gpu("a100-80,memory=100MB"), SHAPE)
    decision = Oobleck(tight, SECOND).begin(members())
    assert decision.steady_state == DOWN
    gone = MembershipChange(0, members(*SHAPE.workers()), tuple(SHAPE.workers()))
    assert Oobleck(tight, SECOND).change(gone, decision.state).steady_state == DOWN


def test_new_pipelines_from_all_nodes_are_never_slower_than_repaired_ones(oobleck):
    lost: list[Worker] = []
    mine = oobleck.begin(members())
    for worker in (Worker(0, 0), Worker(3, 2), Worker(1, 1), Worker(2, 0)):
        event = losing(worker, after=lost)
        lost.append(worker)
        mine = oobleck.change(event, mine.state)
        assert oobleck.begin(members(*lost)).steady_state.step_us <= mine.steady_state.step_us


def test_a_slower_job_takes_longer_steps_and_is_as_busy(oobleck):
    slow = Oobleck(replace(JOB, scale=3.0), SECOND).begin(members()).steady_state
    assert slow.step_us == pytest.approx(3 * oobleck.begin(members()).steady_state.step_us, abs=3)
    assert slow.busy_share == oobleck.begin(members()).steady_state.busy_share


def test_a_negative_number_of_faults_is_refused():
    with pytest.raises(UserError, match="oobleck shall bear -1 faults"):
        Oobleck(JOB, SECOND, faults=-1)


# Whole traces.


def spells(system, trace, shape=SHAPE):
    return [event for event in simulate_trace(system, trace, shape) if isinstance(event, Spell)]


def test_a_job_that_loses_one_node_after_another_trains_until_too_few_are_left(oobleck):
    names = [str(worker) for worker in SHAPE.workers()]
    start = [Change(0, True, name) for name in names]
    losses = [Change(60 * SECOND * number, False, name) for number, name in enumerate(names, start=1)]
    found = spells(oobleck, Trace((*start, *losses), 900 * SECOND))
    assert sum(spell.length_us for spell in found) == 900 * SECOND
    # Two nodes are the fewest: the eleventh loss, after 660 s, is the end.
    assert [(spell.start_us, spell.state) for spell in found if spell.state == "down"] == [
        (660 * SECOND, "down"),
        (720 * SECOND, "down"),
    ]
    assert sum(spell.length_us for spell in found if spell.state == "pause") == 10 * 5 * SECOND


@st.composite
def jobs(draw):
    model = ModelSpec("random", draw(st.integers(4, 12)), 256 * draw(st.integers(2, 8)), 4, vocabulary=1000)
    gpu = parse_gpu(draw(st.sampled_from(["a100-80", "a100-80,memory=2GB", "h200,inter=10Gbit/s"])))
    return SimulatedJob(
        model, gpu, Shape(*(draw(st.integers(1, most)) for most in (5, 4, 8))), scale=draw(st.sampled_from([1.0, 7.5]))
    )


@settings(max_examples=40, deadline=None)
@given(jobs(), st.data())
def test_oobleck_is_never_faster_than_the_ideal(job, data):
    work_us = job.num_microbatches * sum(stage.forward_us + stage.fused_us for stage in job.profile(1).stages)
    ideal = Ideal(job, IterationTime(1, 1, work_us, (0,) * job.shape.num_stages))
    system = Oobleck(job, SECOND, data.draw(st.integers(0, 3)))
    events = membership_changes(data.draw(traces(job.shape)), job.shape, 0)
    first = next(events)
    mine, best = system.begin(first.members), ideal.begin(first.members)
    assert mine.steady_state.samples_per_s <= best.steady_state.samples_per_s * 1.001
    for event in events:
        mine, best = system.change(event, mine.state), ideal.change(event, best.state)
        assert mine.steady_state.samples_per_s <= best.steady_state.samples_per_s * 1.001
        assert 0 <= mine.steady_state.busy_share <= 1
        used = [node for pipeline in mine.state.pipelines for node in pipeline]
        assert sorted([*used, *mine.state.waiting]) == sorted(event.members.live)


@settings(max_examples=25, deadline=None)
@given(traces(SHAPE, most_changes=30))
def test_every_microsecond_of_any_trace_is_in_one_spell(trace):
    assert sum(spell.length_us for spell in spells(Oobleck(JOB, 5 * SECOND), trace)) == trace.end_us


# Steps by the number of nodes, so that a whole trace can be worked out by hand.


def test_nodes_that_join_are_used_from_the_next_reconfiguration_on_and_one_node_is_too_few(monkeypatch):
    """A second a step with four nodes, and a second more for each that is missing."""
    sizes, job = range(2, 5), SimpleNamespace(shape=Shape(2, 2, 4), samples_per_step=10, scaled_us=round)
    monkeypatch.setattr(policy, "best_sizes", lambda job, faults, num_nodes, schedule: (num_nodes,) if num_nodes in sizes else ())
    monkeypatch.setattr(policy, "layout_iteration_us", lambda job, faults, sizes, schedule: (5 - sum(sizes)) * SECOND)
    made = SimpleNamespace(sizes=sizes, costs=SimpleNamespace(work_us=1))
    monkeypatch.setattr(policy, "instances", lambda job, faults, schedule: made)
    names = ["a", "b", "c", "d"]
    changes = [*(Change(0, True, name) for name in names), Change(10 * SECOND, False, "a"), Change(20 * SECOND, True, "a")]
    changes += [Change(at_s * SECOND, False, name) for at_s, name in ((30, "b"), (40, "c"), (50, "d"))]
    found = spells(Oobleck(job, 2 * SECOND), Trace(tuple(changes), 60 * SECOND), job.shape)
    assert [(spell.start_us // SECOND, spell.end_us // SECOND, spell.state, spell.samples) for spell in found] == [
        (0, 10, "train", 100),  # four nodes
        (10, 12, "pause", 0),
        (12, 20, "train", 40),  # three
        (20, 30, "train", 50),  # a fourth waits
        (30, 32, "pause", 0),
        (32, 40, "train", 40),  # it takes part
        (40, 42, "pause", 0),
        (42, 48, "train", 20),  # two: three seconds a step
        (48, 50, "redo", 0),
        (50, 60, "down", 0),
    ]


def test_with_zero_bubble_it_repairs_its_pipelines_as_published_and_its_steps_are_shorter():
    job = SimulatedJob.of("gpt3-6.7b", "a100-80", Shape(4, 8, 8))
    published, without = (Oobleck(job, SECOND, schedule=schedule) for schedule in FaultFreeSchedule)
    first = Members(job.shape, frozenset(job.shape.workers()))
    dead = Worker(1, 2)
    event = MembershipChange(SECOND, Members(job.shape, first.live - {dead}), left=(dead,))
    for system in (published, without):
        begun = system.begin(first)
        after = system.change(event, begun.state)
        assert (after.loses, [pause.cause for pause in after.pauses]) == (Loss.STEP, ["reconfigure"])
        assert sum(after.state.sizes) == 31
    slow, fast = (system.begin(first).steady_state for system in (published, without))
    assert fast.samples == slow.samples
    # No more can be gained than the bubbles: the work of 32 nodes, all of them busy, is the least that a step takes.
    assert slow.busy_share * slow.step_us < fast.step_us < slow.step_us
