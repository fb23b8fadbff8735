"""Varuna: which depth it takes, and what every change of membership costs it."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.core.cluster import Shape
from recycle.core.events.record import Spell
from recycle.core.events.trace import Change, Trace
from recycle.core.profile import Link, Profile, StageProfile
from recycle.sim.campaign.placement import membership_changes
from recycle.sim.campaign.trace_simulation import simulate_trace
from recycle.sim.iteration_times import one_f_one_b_time
from recycle.sim.job import SimulatedJob
from recycle.sim.one_f_one_b import most_bytes, pipeline_us
from recycle.sim.systems.baselines import Ideal
from recycle.sim.systems.varuna import Varuna, best_layout, depths
from tests.sim.jobs import SMALL, small_job, traces

SECOND = 1_000_000
SHAPE = Shape(2, 2, 4)
NAMES = tuple(str(worker) for worker in SHAPE.workers())


@dataclass(frozen=True)
class HandMade:
    """A job of four layers on four nodes, 8 micro-batches: 300 ms for one through all layers, 100 bytes of parameters."""

    memory_bytes: int
    model: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(num_layers=4))
    num_nodes: int = 4
    num_microbatches: int = 8
    samples_per_step: int = 8

    @property
    def gpu(self):
        return SimpleNamespace(memory_bytes=self.memory_bytes)

    def profile(self, num_stages):
        share = [value // num_stages for value in (100_000, 100_000, 100_000, 200_000)]
        stage = StageProfile(*share, activation_bytes=20 // num_stages, static_bytes=100 // num_stages)
        return Profile((stage,) * num_stages, Link(), Link())

    def scaled_us(self, time_us):
        return time_us


ROOMY, TIGHT = HandMade(120), HandMade(70)


def varuna(job=TIGHT):
    return Varuna(job, checkpoint_every=10, checkpoint_us=SECOND, restart_us=5 * SECOND)


def trace(*changes, end_s):
    start = [Change(0, True, name) for name in NAMES]
    return Trace((*start, *(Change(round(at_s * SECOND), joins, name) for at_s, joins, name in changes)), end_s * SECOND)


def spells(given_trace, system=None):
    return [event for event in simulate_trace(system or varuna(), given_trace, SHAPE) if isinstance(event, Spell)]


def spell_rows(found):
    return [(spell.start_us / SECOND, spell.end_us / SECOND, spell.state, spell.cause, spell.samples) for spell in found]


@pytest.mark.parametrize(
    ("num_layers", "wanted"), [(24, [1, 2, 3, 4, 6, 8, 12]), (30, [1, 2, 3, 5, 6, 10, 15]), (7, [1]), (1, [1])]
)
def test_a_depth_is_a_proper_divisor_of_the_layers(num_layers, wanted):
    assert depths(num_layers) == wanted


# The spans of 1F1B that the Zero Bubble paper gives for unit costs.
@pytest.mark.parametrize(("num_stages", "num_microbatches", "wanted"), [(4, 8, 33), (8, 16, 69), (16, 64, 237)])
def test_a_pipeline_takes_as_long_as_1f1b(num_stages, num_microbatches, wanted):
    assert pipeline_us(Profile.uniform(num_stages, 1, 1, 1), num_microbatches) == wanted


def test_a_pipeline_waits_for_the_network_while_it_fills_and_drains():
    # Three links, there and back.
    assert pipeline_us(Profile.uniform(4, 1, 1, 1, comm_us=5), 8) == 33 + 6 * 5


def test_the_first_stage_holds_the_most_micro_batches():
    stage = StageProfile(1, 1, 1, 2, activation_bytes=10, static_bytes=100)
    assert most_bytes(Profile((stage,) * 4), 8) == 140
    assert most_bytes(Profile((stage,) * 4), 3) == 130


def test_the_fastest_depth_that_fits_is_taken():
    # One stage: two micro-batches each, 2 * 300. It holds 100 + 20 bytes.
    assert best_layout(ROOMY, 4).step_us == 600_000
    # Two stages: four micro-batches for each pipeline, 300 + 3 * 150. The first holds 50 + 2 * 10 bytes.
    assert best_layout(TIGHT, 4).step_us == 750_000
    assert best_layout(HandMade(69), 4) is None


def test_nodes_that_fill_no_pipeline_are_idle():
    # One pipeline of two stages with all eight micro-batches: 300 + 7 * 150.
    assert best_layout(TIGHT, 3) == best_layout(TIGHT, 2)
    assert best_layout(TIGHT, 3).step_us == 1_350_000


def test_nodes_beyond_the_cluster_are_not_used():
    assert best_layout(ROOMY, 9) == best_layout(ROOMY, 4)


def test_a_loss_rolls_back_to_the_last_checkpoint_and_partitions_the_job_again():
    # Ten steps of 0.75 s and a checkpoint of 1 s, twice, are 17 s; the four steps until 20 s are lost. Then 1.35 s a step.
    assert spell_rows(spells(trace((20, False, "W0_0"), end_s=30))) == [
        (0.0, 7.5, "train", "", 80),
        (7.5, 8.5, "checkpoint", "", 0),
        (8.5, 16.0, "train", "", 80),
        (16.0, 17.0, "checkpoint", "", 0),
        (17.0, 20.0, "redo", "rolled back", 0),
        (20.0, 25.0, "pause", "restart", 0),
        (25.0, 30.0, "train", "", 24),
    ]


def test_a_checkpoint_that_is_interrupted_loses_its_ten_steps():
    assert spell_rows(spells(trace((8, False, "W0_0"), end_s=12))) == [
        (0.0, 8.0, "redo", "rolled back", 0),
        (8.0, 12.0, "pause", "restart", 0),
    ]


def test_a_node_that_makes_it_faster_is_taken_in_after_a_checkpoint():
    found = spell_rows(spells(trace((20, False, "W0_0"), (30, True, "W0_0"), end_s=40)))
    # The fourth step of 1.35 s ends at 30.4; then 0.75 s a step again. A spell ends where the number of live nodes changes.
    assert found[-5:] == [
        (25.0, 29.05, "train", "", 24),
        (29.05, 30.4, "train", "", 8),
        (30.4, 31.4, "pause", "checkpoint", 0),
        (31.4, 36.4, "pause", "restart", 0),
        (36.4, 40.0, "train", "", 32),
    ]


def test_a_node_that_joins_while_the_job_restarts_needs_no_checkpoint():
    # The loss at 20 s begins a restart of 5 s; the node that joins at 22 s begins it again, and nothing was trained meanwhile.
    found = spell_rows(spells(trace((20, False, "W1_1"), (22, True, "W1_1"), end_s=40)))
    assert found[5:8] == [
        (20.0, 22.0, "pause", "restart", 0),
        (22.0, 27.0, "pause", "restart", 0),
        (27.0, 34.5, "train", "", 80),
    ]


def test_a_node_that_makes_it_no_faster_changes_nothing():
    losses = [(20, False, "W0_0"), (20, False, "W0_1")]
    found = spell_rows(spells(trace(*losses, (21, True, "W0_0"), end_s=31)))
    # Two of three nodes are a pipeline, as two of two are: the restart goes on, and four steps of 1.35 s end by 30.4 s.
    assert found[-3:] == [
        (20.0, 21.0, "pause", "restart", 0),
        (21.0, 25.0, "pause", "restart", 0),
        (25.0, 31.0, "train", "", 32),
    ]


def test_too_few_nodes_for_any_depth_wait_for_one_and_restart():
    gone = [(20, False, name) for name in NAMES[:3]]
    found = spell_rows(spells(trace(*gone, (50, True, "W0_0"), end_s=60)))
    assert found[-4:] == [
        (17.0, 20.0, "redo", "rolled back", 0),
        (20.0, 50.0, "down", "no depth fits on so few nodes and in their memory: the job waits", 0),
        (50.0, 55.0, "pause", "restart", 0),
        (55.0, 60.0, "train", "", 24),
    ]


def test_a_job_that_fits_at_no_depth_never_trains():
    system = varuna(HandMade(69))
    assert [spell.state for spell in spells(trace((20, False, "W0_0"), (30, True, "W0_0"), end_s=40), system)] == ["down"] * 3


def test_a_checkpoint_interval_is_as_configured_after_every_change():
    system = varuna()
    events = list(membership_changes(trace(*((9, False, name) for name in NAMES), end_s=20), SHAPE, 0))
    decision = system.begin(events[0].members)
    assert decision.steady_state.checkpoint_every == 10
    assert system.change(events[1], decision.state).steady_state.checkpoint_every == 10


def test_gpt3_medium_is_trained_no_slower_than_in_its_own_shape():
    job = SimulatedJob.of("gpt3-medium", "a100-80", Shape(16, 2, 8))
    assert best_layout(job, 32).step_us <= one_f_one_b_time(job.problem()).period_us


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_varuna_is_never_faster_than_the_ideal(data):
    shape = Shape(*(data.draw(st.integers(1, most)) for most in (4, 3, 6)))
    job = SimulatedJob.of(SMALL, "a100-80", shape, scale=10.0)
    peer, ideal = varuna(job), Ideal(job, one_f_one_b_time(job.problem()))
    events = membership_changes(data.draw(traces(shape)), shape, 0)
    first = next(events)
    mine, best = peer.begin(first.members), ideal.begin(first.members)
    assert mine.steady_state.samples_per_s <= best.steady_state.samples_per_s * 1.001
    for event in events:
        mine, best = peer.change(event, mine.state), ideal.change(event, best.state)
        assert mine.steady_state.samples_per_s <= best.steady_state.samples_per_s * 1.001


@settings(max_examples=15, deadline=None)
@given(traces(Shape(3, 2, 4)))
def test_every_microsecond_of_any_trace_is_in_one_spell(given_trace):
    job = small_job()
    found = [event for event in simulate_trace(varuna(job), given_trace, job.shape) if isinstance(event, Spell)]
    assert sum(spell.length_us for spell in found) == given_trace.end_us
