"""Plan requests: every request is answered in order, by a plan, a reason to wait, or the error that ends the job."""

from dataclasses import dataclass
from queue import SimpleQueue

import pytest

from recycle.core.cluster import Worker
from recycle.core.errors import ForeignPlan, PlannerFailed, UserError
from recycle.core.plans.plan_source import PlanAssignment, num_live_at
from recycle.runtime.coordinator import plan_requests
from recycle.runtime.coordinator.plan_requests import PlanRequests
from tests.builders import dead
from tests.control.decide.coordinator_harness import SHAPE, answer_for

pytestmark = pytest.mark.timeout(60)
PATIENCE_S = 30.0


@dataclass(frozen=True)
class HandMade:
    """A source with a plan for every set of dead workers that leaves enough of them, and an error for one set."""

    broken: frozenset[Worker] = frozenset()

    def answer(self, failed):
        if failed and failed == self.broken:
            raise UserError("the plan file is broken")
        num_live_at(SHAPE, failed)
        return answer_for(SHAPE, failed)


@pytest.fixture
def delivered():
    return SimpleQueue()


@pytest.fixture
def requests(delivered):
    made = PlanRequests(HandMade(dead("W1_0")), SHAPE, lambda *outcome: delivered.put(outcome))
    yield made
    made.close()


def test_requests_are_answered_in_order_by_plan_reason_or_error(requests, delivered):
    every = frozenset(SHAPE.workers())
    for failed in (dead("W0_0"), every, dead("W1_0"), dead("W1_1")):
        requests.request(failed)
    outcomes = dict(delivered.get(timeout=PATIENCE_S) for _ in range(4))
    assert list(outcomes) == [dead("W0_0"), every, dead("W1_0"), dead("W1_1")]
    assert isinstance(outcomes[dead("W0_0")], PlanAssignment)
    assert "0 live workers cannot hold 2 stages" in outcomes[every]
    assert type(outcomes[dead("W1_0")]) is UserError
    assert isinstance(outcomes[dead("W1_1")], PlanAssignment)


@dataclass(frozen=True)
class Mistaken:
    def answer(self, failed):
        raise ZeroDivisionError("of its own")


def test_a_mistake_of_the_planner_ends_the_job_instead_of_hanging_it(delivered):
    requests = PlanRequests(Mistaken(), SHAPE, lambda *outcome: delivered.put(outcome))
    requests.request(dead("W0_0"))
    _, outcome = delivered.get(timeout=PATIENCE_S)
    assert type(outcome) is PlannerFailed
    assert str(outcome) == "the planner failed: ZeroDivisionError: of its own"
    requests.close()


def test_the_first_epoch_waits_for_the_planner_but_not_for_ever(requests, delivered, monkeypatch):
    now_us = [1_000_000]
    monkeypatch.setattr(plan_requests, "now_us", lambda: now_us[0])
    assert not requests.is_ready()
    now_us[0] += 5_000_001
    assert requests.is_ready()
    now_us[0] -= 5_000_001
    requests.request(frozenset())
    delivered.get(timeout=PATIENCE_S)
    assert requests.is_ready()


def test_a_request_that_is_still_open_when_it_closes_is_not_answered(delivered):
    made = PlanRequests(HandMade(), SHAPE, lambda *outcome: delivered.put(outcome))
    made.request(dead("W0_0"))
    made.close()
    made.request(dead("W0_1"))
    assert delivered.empty()


def test_a_plan_for_other_shared_layers_than_workers_hold_is_an_error(delivered):
    requests = PlanRequests(HandMade(), SHAPE, lambda *outcome: delivered.put(outcome), shared_layers=2)
    try:
        requests.request(dead("W0_0"))
        _, outcome = delivered.get(timeout=PATIENCE_S)
    finally:
        requests.close()
    assert type(outcome) is ForeignPlan
    assert str(outcome) == (
        "the plan after a failure is for stages that share 0 layers, but the workers of this job share 2: plan again"
    )
