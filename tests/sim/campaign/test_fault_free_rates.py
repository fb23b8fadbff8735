"""What results are compared with: each system's own schedule without failures, and the best one that anybody could run."""

import pytest

from recycle.core.cluster import Shape
from recycle.core.events.trace import Trace
from recycle.report.record.metrics import measure
from recycle.sim.campaign.campaign import Case, run_cases
from recycle.sim.campaign.fault_free_rates import fault_free_rates
from recycle.sim.failure_traces import quiet_trace, worker_names
from recycle.sim.iteration_times import IterationTimes
from recycle.sim.job import SimulatedJob
from recycle.sim.systems.constants import Constants
from recycle.sim.systems.registry import BOUNDS, SYSTEMS, SystemContext
from tests.sim.jobs import small_job
from tests.sim.quick_plans import plan_quickly

SECOND = 1_000_000


@pytest.fixture(autouse=True)
def _plan_here(monkeypatch):
    plan_quickly(monkeypatch)


def context(job=None):
    return SystemContext(job or small_job(), Constants.for_model(1e9))


def quiet(job, end_s=3600):
    return quiet_trace(worker_names(job.shape.num_pipelines, job.shape.num_stages), end_s * SECOND)


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_without_failures_every_system_has_its_own_throughput(scale):
    given = context(small_job(scale=scale))
    rates = fault_free_rates(given, SYSTEMS)
    trace = quiet(given.job)
    for name, record in zip(SYSTEMS, run_cases([Case(name, given, trace) for name in SYSTEMS]), strict=True):
        run = measure(record)
        # A step that the end cuts short does not count, and regular checkpoints are fault handling.
        expected = (run.total_us - run.checkpoint_us) / run.total_us
        assert rates.goodput(name, run.throughput) == pytest.approx(expected, rel=2e-3), name


def test_nobody_who_runs_a_schedule_is_faster_than_the_best_one():
    for shape in (Shape(3, 2, 4), Shape(2, 3, 6), Shape(4, 1, 2)):
        given = context(small_job(shape.num_pipelines, shape.num_stages, shape.num_microbatches))
        rates = fault_free_rates(given, SYSTEMS)
        assert {name for name, own in rates.own.items() if own > rates.best} <= BOUNDS
        assert rates.one_f_one_b <= rates.best <= rates.own["ideal"]


def test_the_best_schedule_is_a_plan_in_the_memory_of_the_job_or_that_of_a_system():
    given = context()
    rates = fault_free_rates(given, ["recycle"])
    periods = {shared: IterationTimes(given.job.problem(shared_layers=shared)).fault_free().period_us for shared in range(3)}
    rate = {f"zero-bubble plan, shared layers: {shared}": 12e6 / (period * 10) for shared, period in periods.items()}
    rate["zero-bubble plan"] = rate.pop("zero-bubble plan, shared layers: 0")
    own = fault_free_rates(given, SYSTEMS).own
    rate |= {name: own[name] for name in SYSTEMS if name not in BOUNDS}
    assert rates.best == pytest.approx(max(rate.values()), rel=1e-5)
    assert rates.best == pytest.approx(rate[rates.best_schedule], rel=1e-5)


def test_the_references_do_not_depend_on_the_systems_that_are_asked_for():
    given = context()
    one, two = fault_free_rates(given, ["oobleck"]), fault_free_rates(given, ["recycle", "ideal"])
    assert (one.one_f_one_b, one.best, one.best_schedule) == (two.one_f_one_b, two.best, two.best_schedule)


def test_shares_without_bubbles_tell_scheduling_from_fault_handling():
    given = context()
    rates = fault_free_rates(given, ["recycle-rerouting", "replica-drop"])
    dead = "".join(f"0,add,{name}\n" for name in worker_names(3, 2)) + "1800000,remove,W0_0\n# end 3600000"
    records = run_cases([Case(name, given, Trace.parse(dead)) for name in rates.own])
    ours, theirs = (measure(record).throughput for record in records)
    # One of three pipelines is gone for half of the time; beside the best schedule 1F1B loses its bubbles as well.
    assert rates.goodput("replica-drop", theirs) == pytest.approx(5 / 6, abs=0.01)
    assert rates.best_share(theirs) == pytest.approx(5 / 6 * rates.one_f_one_b / rates.best, abs=0.01)
    share = rates.goodput("recycle-rerouting", ours)
    assert share is not None
    assert 5 / 6 < share < 1 < ours / rates.one_f_one_b / share


def test_a_system_that_cannot_run_the_job_has_no_goodput():
    job = SimulatedJob.of("gpt3-6.7b", "a100-80", Shape(2, 8, 4))
    rates = fault_free_rates(context(job), ["bamboo"])
    assert rates.own["bamboo"] == 0
    assert rates.goodput("bamboo", 0.0) is None
