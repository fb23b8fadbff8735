"""Failure models: the published rates and shares come out over many seeds, groups fail together, repairs are lognormal."""

import math
from collections import Counter, defaultdict
from statistics import fmean, median, pstdev

import pytest

from recycle.core.errors import UserError
from recycle.core.events.trace import Trace
from recycle.sim.failure_model import (
    FAILURE_MODELS,
    HARDWARE_REPAIR,
    FailureScope,
    RepairTime,
    own_failure_model,
    parse_failure_model,
)
from recycle.sim.failure_traces import draw_failures, model_trace, node_names, worker_names

H, D = 3600 * 10**6, 86400 * 10**6
LLAMA3 = FAILURE_MODELS["llama3"]
# Llama 3, table 5: the 18 causes of 419 unexpected interruptions in 54 days on 16,384 GPUs.
PUBLISHED_LLAMA3 = [148, 72, 54, 35, 32, 19, 17, 7, 7, 6, 6, 3, 3, 2, 2, 2, 2, 2]


def within(observed: float, expected: float, num_deviations: float = 4.0) -> bool:
    """Whether a Poisson count is within so many of its standard deviations."""
    return abs(observed - expected) <= num_deviations * math.sqrt(expected)


@pytest.fixture(scope="module")
def llama3_counts() -> tuple[int, Counter]:
    """The number of seeds, and how often each cause came up in the published cluster and time."""
    found = Counter()
    seeds = range(12)
    for seed in seeds:
        found.update(failure.cause.name for failure in draw_failures(LLAMA3, 2048, 8, 54 * D, seed))
    return len(seeds), found


def test_the_llama3_cluster_is_interrupted_as_often_as_published(llama3_counts):
    num_seeds, found = llama3_counts
    assert within(sum(found.values()), num_seeds * 419)


def test_every_cause_of_llama3_comes_up_as_often_as_published(llama3_counts):
    num_seeds, found = llama3_counts
    by_cause = {cause.name: cause.per_gpu_day * 16_384 * 54 for cause in LLAMA3.causes}
    assert sorted(round(count) for count in by_cause.values()) == sorted(PUBLISHED_LLAMA3)
    assert sum(PUBLISHED_LLAMA3) == 419
    assert [name for name, count in by_cause.items() if not within(found[name], num_seeds * count)] == []


@pytest.mark.parametrize(
    ("name", "num_gpus", "published_hours"),
    [("rsc1", 16_384, 1.8), ("rsc1", 131_072, 0.23), ("llama3", 16_384, 54 * 24 / 419)],
)
def test_the_mean_time_to_failure_by_gpu_count_is_the_published_one(name, num_gpus, published_hours):
    assert FAILURE_MODELS[name].mtbf_us(num_gpus) / H == pytest.approx(published_hours, rel=0.025)


@pytest.mark.parametrize(("name", "num_nodes", "days"), [("rsc1", 2048, 30), ("rsc2", 2048, 30), ("rsc1", 128, 300)])
def test_generated_failures_have_the_rate_of_thousand_node_days(name, num_nodes, days):
    per_thousand = {"rsc1": 6.50, "rsc2": 2.34}[name]
    counts = [len(draw_failures(FAILURE_MODELS[name], num_nodes, 8, days * D, seed)) for seed in range(6)]
    assert within(sum(counts), 6 * per_thousand * num_nodes * days / 1000)


def test_the_rate_does_not_depend_on_how_many_gpus_a_worker_has():
    for gpus_per_node in (1, 4, 8, 16):
        counts = [len(draw_failures(LLAMA3, 4096 // gpus_per_node, gpus_per_node, 54 * D, seed)) for seed in range(8)]
        assert within(sum(counts), 8 * 419 / 4)


def test_workers_of_a_machine_and_of_a_rack_fail_together():
    for failure in draw_failures(LLAMA3.times(20), 64, 4, 54 * D, 1):
        size = {FailureScope.GPU: 1, FailureScope.MACHINE: 2, FailureScope.RACK: 4}[failure.cause.scope]
        assert len(failure.indices) == size
        assert failure.indices.start % size == 0


def test_a_rack_that_dies_takes_its_workers_at_one_time():
    model = parse_failure_model("llama3,times=100,rack=64")
    trace = model_trace(model, node_names(32), 8, 10 * D, 3)
    left = defaultdict(int)
    for change in trace.later:
        left[change.at_us] += not change.joins
    # Of a rack of 64 GPUs with 8 workers, all leave together that are not away already.
    assert max(left.values()) == 8
    assert trace.num_outages < trace.num_failures


def test_repairs_have_the_mean_and_the_median_of_the_model():
    times = [
        one.back_us - one.at_us for seed in range(4) for one in draw_failures(own_failure_model(20 * D), 2000, 1, 54 * D, seed)
    ]
    assert len(times) > 15_000
    assert median(times) == pytest.approx(H, rel=0.06)
    assert fmean(times) == pytest.approx(6 * H, rel=0.15)
    assert pstdev([math.log(time) for time in times]) == pytest.approx(HARDWARE_REPAIR.sigma, rel=0.03)


def test_a_repair_of_one_length_is_always_that_long():
    assert {RepairTime(H, H).draw_us(share / 10) for share in range(11)} == {H}


def test_a_seed_gives_the_same_trace_and_a_longer_one_begins_like_it():
    nodes = worker_names(8, 8)
    short, long = (model_trace(LLAMA3.times(50), nodes, 8, days * D, 7) for days in (5, 9))
    assert short == model_trace(LLAMA3.times(50), nodes, 8, 5 * D, 7)
    assert short.later == tuple(change for change in long.later if change.at_us < 5 * D)
    assert short != model_trace(LLAMA3.times(50), nodes, 8, 5 * D, 8)


def test_hangs_are_in_the_trace_and_in_its_file():
    trace = model_trace(LLAMA3.times(100), node_names(64), 8, 20 * D, 1)
    assert 0 < trace.num_hangs < trace.num_failures / 10
    assert ",hang,node" in trace.dumps()
    assert Trace.parse(trace.dumps()) == trace


def test_only_hardware_waits_longer_for_a_repair():
    longer = parse_failure_model("llama3,repair=24h")
    assert {cause.repair.mean_us for cause in longer.causes} == {24 * H, 300 * 10**6}


def test_a_model_is_read_from_text():
    assert parse_failure_model("rsc1") is FAILURE_MODELS["rsc1"]
    assert parse_failure_model("rsc1,times=2").mtbf_us(1024) * 2 == pytest.approx(FAILURE_MODELS["rsc1"].mtbf_us(1024))
    assert parse_failure_model("mtbf=1024d").mtbf_us(1024) == D
    assert parse_failure_model("llama3,machine=4,rack=72").gpus_per_rack == 72


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("llama4", "choose from llama3, rsc1, rsc2"),
        ("llama3,speed=2", "change times, repair, machine or rack"),
        ("llama3,times=-1", "from 0.000001 to 1000000"),
        ("llama3,rack=many", "whole number of GPUs"),
        ("llama3,rack=0", "from 1 to 1000000"),
        ("llama3,repair=soon", "not a duration"),
        ("mtbf=0s", "at least 1 ms"),
    ],
)
def test_a_bad_model_is_refused_with_what_to_do(text, problem):
    with pytest.raises(UserError, match=problem):
        parse_failure_model(text)


def test_far_too_many_failures_are_refused_before_they_are_drawn():
    with pytest.raises(UserError, match="changes, more than the"):
        model_trace(own_failure_model(1000), node_names(1000), 8, D, 1)
