"""All systems of the registry over random traces: time is conserved, no system beats the ideal, no trace raises."""

from dataclasses import fields, replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.core.cluster import Shape
from recycle.core.events.record import Changed, Spell
from recycle.core.events.trace import Change, Slowdown, Trace
from recycle.report.record.metrics import measure
from recycle.sim.campaign.trace_simulation import simulate_trace
from recycle.sim.systems.baselines import FaultScaled, Ideal
from recycle.sim.systems.constants import Constants
from recycle.sim.systems.registry import SYSTEMS, SystemContext, parse_systems
from tests.sim.hand_made import HandMade, spell_rows, spells, trace
from tests.sim.jobs import small_job
from tests.sim.quick_plans import plan_quickly

SECOND = 1_000_000
SHAPES = (Shape(3, 2, 4), Shape(2, 3, 5), Shape(1, 2, 3), Shape(4, 1, 2))
NUM_SPARES = 2
# Another node is always there for a job with spares, however many have left: it has its own test.
SPARES = ("checkpoint-restart-spare", "checkpoint-restart-spare-zb")
OTHERS = [name for name in SYSTEMS if name not in SPARES]
DEFAULT = Constants.for_model(1e9)


def hasty(constants):
    """The same without any pause, so that no pause hides a system that is faster than can be."""
    tables = {item.name: getattr(constants, item.name) for item in fields(constants) if not item.name.endswith("_us")}
    times = {name: [item.name for item in fields(table) if item.name.endswith("_us")] for name, table in tables.items()}
    without = {name: replace(table, **dict.fromkeys(times[name], 0)) for name, table in tables.items()}
    # ReCycle and restarts still look back to a checkpoint, else they would never lose anything.
    without["recycle"] = replace(without["recycle"], checkpoint_interval_us=20 * SECOND)
    without["checkpoint_restart"] = replace(without["checkpoint_restart"], checkpoint_interval_us=20 * SECOND)
    without["varuna"] = replace(without["varuna"], checkpoint_interval_us=20 * SECOND)
    return replace(constants, **without, ready_us=0, hang_us=0)


CONSTANTS = {
    "default": DEFAULT,
    "hasty": hasty(DEFAULT),
    "nobody moves": replace(DEFAULT, recycle=replace(DEFAULT.recycle, moves=False)),
}


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    """Every system, made once for each shape and constants: what one example planned, the next one knows."""
    folder = tmp_path_factory.mktemp("plans")
    monkeypatch = pytest.MonkeyPatch()
    plan_quickly(monkeypatch)

    @cache
    def make(name, shape, constants):
        job = small_job(shape.num_pipelines, shape.num_stages, shape.num_microbatches)
        return SYSTEMS[name](SystemContext(job, CONSTANTS[constants], folder, mtbf_us=120 * SECOND))

    yield make
    monkeypatch.undo()


@st.composite
def campaigns(draw):
    """A shape, constants, and any trace: workers and spares leave, hang and join, several at once; some begin with nobody."""
    shape = draw(st.sampled_from(SHAPES))
    names = [*map(str, shape.workers()), *(f"node{number}" for number in range(draw(st.integers(0, NUM_SPARES))))]
    first_ms = draw(st.sampled_from((0, 0, 0, 7_000)))
    end_ms = first_ms + draw(st.integers(1, 600_000))
    changes = [Change(first_ms * 1000, True, name) for name in draw(st.lists(st.sampled_from(names), min_size=1, unique=True))]
    present = {change.node for change in changes}
    for at_ms in sorted(draw(st.lists(st.integers(first_ms, end_ms), max_size=8))):
        flips = draw(st.one_of(st.just(sorted(present)), st.lists(st.sampled_from(names), min_size=1, max_size=4)))
        for name in flips:
            hangs = name in present and draw(st.booleans())
            changes.append(Change(at_ms * 1000, name not in present, name, hangs))
            present ^= {name}
    return shape, draw(st.sampled_from(sorted(CONSTANTS))), Trace(tuple(changes), end_ms * 1000)


def named(first, *changes, end_s):
    """A trace of these first nodes and of changes at whole seconds, such as (60, False, "W0_0")."""
    start = [Change(0, True, name) for name in first]
    return Trace((*start, *(Change(at_s * SECOND, joins, name) for at_s, joins, name in changes)), end_s * SECOND)


def run(system, campaign, name):
    shape, constants, trace = campaign
    given = CONSTANTS[constants]
    return simulate_trace(system(name, shape, constants), trace, shape, given.ready_us, given.hang_us_of(name))


@pytest.mark.parametrize("name", SYSTEMS)
@settings(deadline=None, max_examples=60)
@given(campaigns())
def test_no_trace_is_an_exception_and_every_microsecond_is_accounted_for(system, name, campaign):
    record, trace = run(system, campaign, name), campaign[2]
    spells = [event for event in record if isinstance(event, Spell)]
    assert spells[0].start_us == 0
    assert all(before.end_us == after.start_us for before, after in pairwise(spells))
    assert spells[-1].end_us == trace.end_us
    found = measure(record)
    assert min(found.busy_us, found.bubble_us, found.redo_us, found.checkpoint_us, found.pause_us, found.down_us) >= 0
    parts = found.busy_us + found.bubble_us + found.redo_us + found.checkpoint_us + found.pause_us + found.down_us
    assert parts == found.total_us == trace.end_us
    assert [(event.at_us, event.node) for event in record if isinstance(event, Changed)] == [
        (change.at_us, change.node) for change in trace.later
    ]


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_waits_until_the_first_nodes_join(system, name):
    shape = SHAPES[0]
    late = [Change(60 * SECOND, True, str(worker)) for worker in shape.workers()]
    record = run(system, (shape, "default", Trace(tuple(late), 3600 * SECOND)), name)
    ready_us = 60 * SECOND + DEFAULT.ready_us
    found = [event for event in record if isinstance(event, Spell)]
    waits = [spell for spell in found if spell.start_us < ready_us]
    assert [(spell.state, spell.end_us, spell.num_live) for spell in waits] == [("down", ready_us, 0)]
    assert samples(record) > 0


def samples(record):
    return sum(event.samples for event in record if isinstance(event, Spell))


def step_of(shape):
    return shape.num_pipelines * shape.num_microbatches  # one sample a micro-batch


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "ideal"])
@settings(deadline=None, max_examples=60)
@given(campaigns())
def test_nobody_is_faster_than_the_ideal(system, name, campaign):
    # The ideal counts in steps of its own, a part of which it may still have in flight when the other one's just ended. That is
    # less than a step of the job, whatever happened before: no change makes the ideal wait. The baseline fault-scaled ends at
    # every change its step in flight, and so may be ahead by a step for each.
    num_steps = 1 + (len(campaign[2].later) if name == "fault-scaled" else 0)
    assert samples(run(system, campaign, name)) <= samples(run(system, campaign, "ideal")) + num_steps * step_of(campaign[0])


@st.composite
def slow_campaigns(draw):
    """The same with up to three slow workers or links."""
    shape, constants, trace = draw(campaigns())
    nodes, end_ms = sorted({change.node for change in trace.changes}), trace.end_us // 1000
    found = []
    for _ in range(draw(st.integers(1, 3))):
        start_ms = draw(st.integers(0, end_ms))
        end = (start_ms + draw(st.integers(1, 300_000))) * 1000
        found.append(Slowdown(start_ms * 1000, end, draw(st.sampled_from(nodes)), 0.5, draw(st.booleans())))
    return shape, constants, trace.with_slowdowns(found)


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "ideal"])
@settings(deadline=None, max_examples=15)
@given(slow_campaigns())
def test_slow_workers_break_no_account_and_make_nobody_faster_than_the_ideal(system, name, campaign):
    record, trace = run(system, campaign, name), campaign[2]
    found = [event for event in record if isinstance(event, Spell)]
    assert [found[0].start_us, found[-1].end_us] == [0, trace.end_us]
    assert all(before.end_us == after.start_us for before, after in pairwise(found))
    num_steps = 1 + len(trace.later) + 2 * len(trace.slowdowns)  # a step in flight ends as it began
    assert samples(record) <= samples(run(system, campaign, "ideal")) + num_steps * step_of(campaign[0])


@pytest.mark.parametrize("name", SPARES)
@settings(deadline=None, max_examples=60)
@given(campaigns())
def test_a_job_with_endless_spares_is_not_faster_than_the_ideal_that_nobody_leaves(system, name, campaign):
    shape, constants, trace = campaign
    nobody_leaves = shape, constants, Trace(tuple(Change(0, True, str(worker)) for worker in shape.workers()), trace.end_us)
    best = samples(run(system, nobody_leaves, "ideal"))
    assert samples(run(system, campaign, name)) <= best + step_of(shape)


def test_the_ideal_does_not_wait_for_a_step_that_one_worker_began_alone(system):
    shape = Shape(3, 2, 4)
    first, *others = map(str, shape.workers())
    trace = named([first], *((1, True, name) for name in others), end_s=9)
    alone, together = (
        samples(simulate_trace(system("ideal", shape, "hasty"), given, shape))
        for given in (named([first], end_s=9), named([first, *others], end_s=9))
    )
    # One second alone and eight together, of nine seconds each; steps of the ideal are a sample or two.
    assert samples(simulate_trace(system("ideal", shape, "hasty"), trace, shape)) == pytest.approx(
        alone / 9 + together * 8 / 9, abs=4
    )


@settings(deadline=None, max_examples=100)
@given(campaigns())
def test_recycle_drops_no_sample_and_adds_whole_steps(system, campaign):
    record = run(system, campaign, "recycle")
    found = measure(record)
    assert found.dropped_samples == 0
    assert all(event.samples % step_of(campaign[0]) == 0 for event in record if isinstance(event, Spell))


@pytest.mark.parametrize("name", SYSTEMS)
@settings(deadline=None, max_examples=20)
@given(campaigns())
def test_the_same_trace_gives_the_same_record(system, name, campaign):
    assert run(system, campaign, name) == run(system, campaign, name)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_when_everybody_has_left_the_job_is_down_until_the_end(system, name, shape):
    names = [str(worker) for worker in shape.workers()]
    trace = named(names, *((60, False, name) for name in names), end_s=180)
    *_, last = simulate_trace(system(name, shape, "default"), trace, shape)
    assert (last.state, last.end_us, last.num_live) == ("down", 180 * SECOND, 0)
    # The baselines do not lose the step in flight: they end it first.
    assert last.length_us > 110 * SECOND if name in ("ideal", "fault-scaled") else last.length_us == 120 * SECOND


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_job_whose_nodes_come_late_waits_for_them(system, name):
    shape = Shape(2, 3, 5)
    names = [str(worker) for worker in shape.workers()]
    trace = Trace((Change(0, True, "W0_0"), *(Change(60 * SECOND, True, name) for name in names[1:])), 1800 * SECOND)
    found = measure(simulate_trace(system(name, shape, "default"), trace, shape, DEFAULT.ready_us))
    assert found.samples > 0
    # Three stages on one node do not fit most systems: these are down for 60 s, and 45 s until the others can be used.
    alone = {"elaswave", "resihp", "odyssey", "oobleck", "oobleck-zb", "varuna", *SPARES, "fault-scaled", "ideal"}
    assert found.down_us == (0 if name in alone else 105 * SECOND)


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_spare_that_comes_and_goes_changes_nothing(system, name):
    shape = Shape(3, 2, 4)
    names = [str(worker) for worker in shape.workers()]
    quiet = named(names, end_s=300)
    busy = named(names, (60, True, "node0"), (120, True, "node1"), (200, False, "node0"), (220, False, "node1"), end_s=300)
    found, wanted = (measure(simulate_trace(system(name, shape, "default"), trace, shape)) for trace in (busy, quiet))
    assert (found.samples, found.pause_us, found.redo_us) == (wanted.samples, wanted.pause_us, wanted.redo_us)


# Bamboo's predecessor takes over within the step, so that it is not lost.
@pytest.mark.parametrize("name", [name for name in SYSTEMS if name not in ("fault-scaled", "ideal", "bamboo")])
def test_a_spare_that_steps_in_at_once_does_not_save_the_step_in_flight(system, name):
    shape = Shape(3, 2, 4)
    names = [*map(str, shape.workers()), "node0"]
    record = simulate_trace(system(name, shape, "default"), named(names, (100, False, "W1_1"), end_s=1000), shape)
    found = measure(record)
    assert found.redo_us > 0
    assert found.pause_us > 0
    assert found.down_us == 0


def test_all_systems_are_in_the_registry_under_their_own_names(system):
    assert parse_systems("all") == list(SYSTEMS)
    assert [system(name, SHAPES[0], "default").name for name in SYSTEMS] == list(SYSTEMS)


# Four workers, a step of 1 s in which each computes 0.8 s, 8 samples a step: without a bubble four workers need 0.8 s for it.
FOUR = HandMade(num_pipelines=2)


def test_the_ideal_spreads_the_work_over_the_live_nodes():
    # 10 s of four: 12.5 steps. 10 s of three: 9.375 steps. 10 s of none. 10 s of one: 3.125 steps.
    leaves = [(10, "remove", "W0_0"), *((20, "remove", name) for name in ("W0_1", "W1_0", "W1_1"))]
    found = spells(Ideal(FOUR, FOUR.timing), trace(FOUR, *leaves, (30, "add", "W1_1"), end_s=40))
    added = {num: sum(spell.samples for spell in found if spell.num_live == num) for num in (4, 3, 0, 1)}
    # The sample in flight is finished first, even without a node: the ideal loses nothing.
    assert added == pytest.approx({4: 100, 3: 75, 0: 0, 1: 25}, abs=1)
    assert sum(spell.length_us for spell in found if spell.state == "down") == pytest.approx(10 * SECOND, abs=0.2 * SECOND)
    assert all(spell.busy_us == spell.length_us for spell in found if spell.state == "train")


def test_fault_scaled_is_fault_free_1f1b_slowed_by_the_share_of_the_dead():
    leaves = [(10.5, "remove", "W0_0"), (10.5, "remove", "W0_1"), (51, "remove", "W1_0")]
    found = spells(FaultScaled(FOUR, FOUR.timing), trace(FOUR, *leaves, end_s=61))
    assert spell_rows(found) == [
        (0.0, 10.0, "train", "", 80, 0),
        (10.0, 51.0, "train", "", 168, 0),  # the step in flight ends at 11 s as it began; two workers take 2 s for each of 20
        (51.0, 61.0, "train", "", 16, 0),  # one takes 4 s, and the third step is not finished
    ]
    assert [spell.busy_us / spell.length_us for spell in found] == pytest.approx([0.8] * 3)


def test_baselines_use_no_more_nodes_than_the_job_has():
    for system in (Ideal(FOUR, FOUR.timing), FaultScaled(FOUR, FOUR.timing)):
        few, many = (spells(system, trace(FOUR, end_s=10, spares=spares)) for spares in ((), ("node1", "node2")))
        assert [spell.samples for spell in few] == [spell.samples for spell in many]
