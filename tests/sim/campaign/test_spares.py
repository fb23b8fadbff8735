"""Spares: they take the places of nodes that fail, once for all systems, and repaired nodes wait as spares."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle.core.errors import UserError
from recycle.core.events.trace import Change, Slowdown, Trace, live_counts
from recycle.report.record.metrics import measure
from recycle.sim.campaign.campaign import Case, run_cases
from recycle.sim.campaign.spares import most_missing, spare_names, with_spares
from recycle.sim.failure_traces import poisson_trace, worker_names
from recycle.sim.systems.constants import Constants
from recycle.sim.systems.registry import SYSTEMS, SystemContext
from tests.sim.jobs import small_job

H = 3600 * 10**6
PLACES = ("W0_0", "W0_1", "W1_0", "W1_1")


def named(*changes, nodes=PLACES, end=100):
    later = (Change(at, joins, node) for at, joins, node in changes)
    return Trace((*(Change(0, True, node) for node in nodes), *later), end)


def later(trace):
    return [(change.at_us, change.joins, change.node) for change in trace.later]


def test_without_spares_the_trace_stays_the_same():
    trace = named((10, False, "W0_1"))
    assert with_spares(trace, 4, ()) is trace


def test_a_spare_is_added_at_the_moment_at_which_a_node_leaves():
    trace = with_spares(named((10, False, "W0_1")), 4, spare_names(2))
    assert trace.initial == PLACES
    assert later(trace) == [(10, False, "W0_1"), (10, True, "spare0")]


def test_a_node_that_is_repaired_waits_as_a_spare_for_the_next_failure():
    trace = named((10, False, "W0_1"), (20, True, "W0_1"), (30, False, "W1_1"), (40, False, "W1_0"))
    assert later(with_spares(trace, 4, spare_names(1))) == [
        (10, False, "W0_1"),
        (10, True, "spare0"),
        (30, False, "W1_1"),
        (30, True, "W0_1"),
        (40, False, "W1_0"),
    ]


def test_a_node_that_is_repaired_takes_an_empty_place_at_once():
    trace = named((10, False, "W0_1"), (11, False, "W1_1"), (20, True, "W1_1"))
    assert later(with_spares(trace, 4, spare_names(1)))[-1] == (20, True, "W1_1")


def test_a_spare_that_has_failed_cannot_step_in_until_it_is_repaired():
    nodes = (*PLACES, "spare0")
    trace = named((5, False, "spare0"), (10, False, "W0_1"), (30, True, "spare0"), nodes=nodes)
    assert later(with_spares(trace, 4, ["spare0"])) == [(10, False, "W0_1"), (30, True, "spare0")]


def test_a_rack_takes_as_many_spares_as_there_are():
    trace = named((10, False, "W0_0"), (10, False, "W0_1"), (10, False, "W1_0"))
    found = with_spares(trace, 4, spare_names(2))
    assert [change for change in later(found) if change[1]] == [(10, True, "spare0"), (10, True, "spare1")]
    assert most_missing(found, 4) == 1


def test_slow_spares_are_slow_only_if_they_are_used():
    slow = (Slowdown(1, 90, "spare0", 0.5), Slowdown(1, 90, "spare1", 0.5))
    trace = named((10, False, "W0_1"), nodes=(*PLACES, "spare0", "spare1")).with_slowdowns(slow)
    assert with_spares(trace, 4, ["spare0", "spare1"]).slowdowns == slow[:1]


@given(num_spares=st.integers(0, 6), seed=st.integers(0, 100), rejoin_h=st.none() | st.integers(1, 20))
def test_no_more_nodes_are_live_than_there_are_places_and_no_fewer_than_without_spares(num_spares, seed, rejoin_h):
    names = spare_names(num_spares)
    drawn = poisson_trace((*PLACES, *names), 30 * H, 100 * H, seed, rejoin_h * H if rejoin_h else None)
    found = dict(live_counts(with_spares(drawn, 4, names)))
    alive = dict(live_counts(drawn))
    count = 4
    for at_us, in_all in alive.items():
        count = found.get(at_us, count)
        assert count == min(4, in_all)


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name != "bamboo"])
def test_every_system_does_more_with_a_spare_when_a_worker_is_gone_for_good(name, tmp_path):
    job = small_job(3, 2, 4)
    context = SystemContext(job, Constants.for_model(job.model.num_parameters), tmp_path, shared_layers=0)
    nodes = worker_names(3, 2)
    alone = named((H, False, "W1_1"), nodes=nodes, end=20 * H)
    cases = [Case(name, context, trace) for trace in (alone, with_spares(alone, len(nodes), spare_names(1)))]
    without, with_one = (measure(record).samples for record in run_cases(cases))
    if name.startswith(("oobleck", "checkpoint-restart-spare")):
        # Oobleck's spare waits for the next reconfiguration; the other one has endless spares anyway.
        assert with_one >= without
    else:
        assert with_one > without


def test_a_negative_number_of_spares_is_refused():
    with pytest.raises(UserError, match="from 0 to"):
        spare_names(-1)
