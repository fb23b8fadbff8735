"""Exchanged places: messages go around slow links, peers change places with peers of their speed only, and nothing else moves."""

import random
from itertools import permutations, product

import pytest

import recycle
from recycle.control.drift.place_exchange import exchange_places
from recycle.control.drift.relative_links import WorkerPair
from recycle.core.cluster import Worker
from recycle.core.plans.plan_source import PlanAssignment
from recycle.core.plans.row_programs import row_programs

WHOLE = recycle.solve(recycle.problem(3, 3, 3, costs="1,1,1"), "greedy", effort=500)
WITHOUT = recycle.solve(recycle.problem(3, 3, 3, costs="1,1,1", fail="W1_1"), "greedy", effort=500)


def as_it_is(plan):
    return PlanAssignment(plan, {row.worker: row.worker for row in plan.rows}, "as it is")


def pair(text):
    return WorkerPair(*map(Worker.parse, text.split("-")))


def delay_us(assignment, delays_us):
    """The sum of delays of all messages, as the programs of the rows send them; both ways, so that it is halved."""
    total = 0
    for row, program in row_programs(assignment.plan).items():
        for kind, pipeline in zip(program.kinds, program.receivers, strict=True):
            if pipeline >= 0:
                receiver = Worker(pipeline, row.stage + (1 if kind == "F" else -1))
                ends = sorted((assignment.places[row], assignment.places[receiver]), key=lambda worker: worker.stage)
                total += delays_us.get(WorkerPair(*ends), 0)
    return total / 2


def all_assignments(plan):
    """All ways to exchange places within stages."""
    rows = [row.worker for row in plan.rows]
    stages = [[row for row in rows if row.stage == stage] for stage in range(3)]
    for orders in product(*(permutations(stage) for stage in stages)):
        places = {row: now for stage, order in zip(stages, orders, strict=True) for row, now in zip(stage, order, strict=True)}
        yield PlanAssignment(plan, places, "")


def test_two_peers_exchange_their_places_around_a_slow_link():
    moved = exchange_places(as_it_is(WHOLE), {pair("W1_1-W1_2"): 20_000}, lambda worker: 1.0)
    assert len(moved.moves) == 2
    assert moved.copies == ()
    assert moved.places[Worker(1, 1)] != Worker(1, 1) or moved.places[Worker(1, 2)] != Worker(1, 2)
    assert delay_us(moved, {pair("W1_1-W1_2"): 20_000}) == 0
    assert moved.plan is WHOLE


@pytest.mark.parametrize("plan", [WHOLE, WITHOUT], ids=["all", "one dead"])
@pytest.mark.parametrize("seed", range(15))
def test_exchanges_save_time_on_slow_links_and_for_one_link_as_much_as_any_order_can(plan, seed):
    chance = random.Random(seed)
    live = [row.worker for row in plan.rows]
    pairs = [WorkerPair(one, other) for one in live for other in live if other.stage == one.stage + 1]
    delays_us = {each: chance.randrange(1, 9) * 1000 for each in chance.sample(pairs, chance.randrange(1, 4))}
    before, moved = as_it_is(plan), exchange_places(as_it_is(plan), delays_us, lambda worker: 1.0)
    assert all(now.stage == place.stage for place, now in moved.places.items())
    assert delay_us(moved, delays_us) <= delay_us(before, delays_us)
    if len(delays_us) == 1:
        assert delay_us(moved, delays_us) == min(delay_us(each, delays_us) for each in all_assignments(plan))


def test_a_worker_changes_places_only_with_peers_of_its_speed():
    speeds = {Worker(1, 1): 0.5, Worker(1, 2): 0.5}
    delays_us = {pair("W1_1-W1_2"): 20_000}
    assert exchange_places(as_it_is(WHOLE), delays_us, lambda worker: speeds.get(worker, 1.0)).moves == ()
    speeds[Worker(0, 2)] = 0.5
    moved = exchange_places(as_it_is(WHOLE), delays_us, lambda worker: speeds.get(worker, 1.0))
    assert {now for now, _ in moved.moves} == {Worker(1, 2), Worker(0, 2)}


def test_nobody_moves_for_a_link_that_carries_no_messages_or_if_all_are_slow():
    assert exchange_places(as_it_is(WHOLE), {pair("W0_1-W1_2"): 20_000}, lambda worker: 1.0).moves == ()
    every = {WorkerPair(Worker(p, 1), Worker(q, 2)): 20_000.0 for p in range(3) for q in range(3)}
    assert exchange_places(as_it_is(WHOLE), every, lambda worker: 1.0).moves == ()
    assert exchange_places(as_it_is(WHOLE), {}, lambda worker: 1.0).moves == ()
    assert exchange_places(as_it_is(WITHOUT), {pair("W1_0-W1_1"): 20_000}, lambda worker: 1.0).moves == ()
