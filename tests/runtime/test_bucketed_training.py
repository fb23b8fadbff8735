"""A gradient that is summed in several buckets gives the weights of one that is summed at once, also if workers die meanwhile."""

import pytest
import torch
from torch import nn

import recycle
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.core.events.record import Recovered
from recycle.planner.live_planner import Planner
from recycle.runtime.compute.gradients import make_sums
from recycle.runtime.execute.buckets import make_buckets
from tests.runtime.jobs import LEASE_S, WIDTH, Numbers, greedy_plan, loss
from tests.runtime.reference_executor import ReferenceExecutor

pytestmark = pytest.mark.timeout(240)
WIDE, STEPS, SEED = 220_000, 3, 5


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def wide_stage():
    """A stage of three buckets: a layer each, and the marks."""
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(WIDTH, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDTH))


def test_workers_that_die_while_buckets_are_summed_change_no_bit():
    assert len(make_buckets(make_sums(wide_stage().parameters(), 3, is_exact=True))) == 3
    plan, events = greedy_plan((3, 1, 1)), []
    kills = [Injection.parse(Action.KILL, place) for place in ("W1_0@1:last", "W0_0@2:reduce")]
    failures = recycle.FailureOptions(Planner(plan.problem), Script.of(kills, plan.problem.shape, STEPS), lease_s=LEASE_S)
    options = recycle.TrainOptions(SEED, is_exact=True, failures=failures)
    run = recycle.train(plan, [wide_stage()], Numbers(), loss, sgd, steps=STEPS, out=None, options=options, watch=events.append)
    assert sum(isinstance(event, Recovered) for event in events) == 2
    reference = ReferenceExecutor(plan, [wide_stage()], Numbers(), loss, sgd, seed=SEED, is_exact=True)
    assert list(run.losses) == [reference.iterate(step) for step in range(STEPS)]
    assert run.weights_sha256 == reference.weights_sha256()
