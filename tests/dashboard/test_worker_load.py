"""Which layers each worker computes by a plan: whole stages, those of a dead peer, and layers that stages share."""

from dataclasses import replace
from functools import cache

import pytest

import recycle
from recycle.core.cluster import Worker
from recycle.core.plans.carried_layers import carried_layers
from recycle.dashboard.views.worker_load import worker_load
from tests.dashboard.run_folders import make_client, write_run
from tests.recovery_records import whole_plan


@cache
def planned(shared_layers):
    problem = recycle.problem(3, 4, 6, fail="W1_2", costs="10,13,9", memory=8, layers=16)
    return recycle.solve(replace(problem, shared_layers=shared_layers), "greedy", 5.0)


def test_without_shared_layers_peers_compute_the_layers_of_a_dead_worker():
    carried = carried_layers(planned(0))
    assert Worker(1, 2) not in carried
    assert carried[Worker(0, 0)] == pytest.approx(dict.fromkeys(range(4), 1 / 3))
    assert carried[Worker(0, 2)] == pytest.approx(dict.fromkeys(range(8, 12), 1 / 2))


def test_shared_layers_take_load_from_the_peers_of_a_dead_worker():
    plan = planned(2)
    carried = carried_layers(plan)
    assert plan.cuts
    assert all(sum(layers.get(layer, 0) for layers in carried.values()) == pytest.approx(1) for layer in range(16))
    assert sum(carried[Worker(0, 2)].values()) < 2
    assert set(carried[Worker(0, 1)]) - set(range(4, 8))
    load = worker_load(plan, Worker(0, 2))
    assert (load["num_layers"], load["share"]) == (16, pytest.approx(load["load"] / 16, abs=1e-4))
    assert [layer for layer, _ in load["layers"]] == sorted(carried[Worker(0, 2)])


def test_a_dead_worker_and_a_plan_that_knows_no_layers_have_no_load():
    assert worker_load(planned(0), Worker(1, 2))["layers"] == []
    assert worker_load(whole_plan(), Worker(0, 0)) == {"layers": [], "load": 0, "share": 0.0, "num_layers": 0}


def test_the_page_asks_for_the_load_of_a_worker(tmp_path):
    planned(2).save(write_run(tmp_path / "a") / "plans" / "from-iteration-9.json")
    client = make_client(tmp_path)
    assert client.get("/api/run/load?id=a&worker=W0_2").json()["num_layers"] == 16
    assert client.get("/api/run/load?id=a&worker=<b>").status_code == 422
