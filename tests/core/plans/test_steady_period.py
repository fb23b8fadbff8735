"""The steady period of a plan's rows at other speeds, beside what the simulator's replay finds."""

import pytest

import recycle
from recycle.core.cluster import Worker
from recycle.core.plans.steady_period import steady_period_us, with_speeds
from recycle.sim.replay.replay import Conditions, replay

PROBLEMS = {
    "fault-free": {},
    "one dead": {"fail": "W1_2"},
    "synchronous": {"techniques": "adaptive,decoupled"},
    "1F1B": {"techniques": "none"},
    "links": {"comm": 400},
    "shared layers": {"layers": 16, "shared_layers": 1, "fail": "W1_2"},
    "a slow worker": {"speeds": "W0_1=0.6"},
}


def plan_of(name):
    return recycle.solve(recycle.problem(3, 4, 6, costs="10000,13000,9000", memory=8, **PROBLEMS[name]), "greedy", 5)


@pytest.mark.parametrize("name", PROBLEMS)
def test_as_planned_it_is_the_period(name):
    plan = plan_of(name)
    assert steady_period_us(plan) <= plan.period_us
    assert steady_period_us(plan) == pytest.approx(plan.period_us, rel=0.02)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("slow", ["W2_3", "W0_0"])
def test_at_other_speeds_it_is_what_the_simulator_finds(name, slow):
    plan, worker = plan_of(name), Worker.parse(slow)
    at_speed = with_speeds(plan, (*plan.problem.speeds, (worker, 0.6)))
    replayed = replay(plan, Conditions(30, eager=True, slow={worker: 1 / 0.6})).steady_period_us
    # The replay also knows that an op with a neighbour's layers waits for the neighbour's step.
    assert steady_period_us(at_speed) == pytest.approx(replayed, rel=0.04 if plan.problem.shared_layers else 0.002)
    assert steady_period_us(at_speed) <= replayed * 1.002


def test_speeds_of_dead_workers_do_not_matter():
    plan = plan_of("one dead")
    assert with_speeds(plan, ((Worker(1, 2), 0.1), (Worker(0, 0), 0.5))).problem.speeds == ((Worker(0, 0), 0.5),)
