"""Oobleck's templates: which sizes there are, how layers are cut, and which multiset of them is the fastest."""

from itertools import accumulate, combinations, combinations_with_replacement, pairwise, product
from time import process_time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from recycle.core.cluster import Shape
from recycle.core.profile import Link
from recycle.planner.profiles.catalog import ModelSpec, parse_gpu
from recycle.planner.profiles.estimate import LayerCost
from recycle.sim.fault_free_schedule import FaultFreeSchedule
from recycle.sim.job import SimulatedJob
from recycle.sim.systems.oobleck.instances import Instances, TemplateCosts, instances, slowest_ns
from recycle.sim.systems.oobleck.multisets import exchanges, multisets, num_multisets, of_two_sizes
from recycle.sim.systems.oobleck.templates import (
    Template,
    cut_layers,
    fewest_nodes,
    planned_time,
    template_sizes,
    templates,
    tolerated_faults,
)
from tests.processes import depends_on_load

LATENCIES = st.lists(st.integers(1, 12), min_size=1, max_size=9).map(tuple)


def stage_latencies(latencies, num_layers):
    return [sum(latencies[start:end]) for start, end in pairwise(accumulate(num_layers, initial=0))]


def all_cuts(num_layers, num_stages):
    for ends in combinations(range(1, num_layers), num_stages - 1):
        yield [end - start for start, end in pairwise((0, *ends, num_layers))]


def hand_made(slowest, *, num_microbatches=12, num_wanted=1, fewest=1, gradient_bytes=0.0, link=None, hidden=0):
    """Instances of templates from `fewest` nodes on whose slowest stages take so many µs; one micro-batch takes 100 µs in all."""
    made = tuple(
        Template((1,) * size, 1000 * latency, gradient_bytes / size, 1000 * hidden)
        for size, latency in enumerate(slowest, fewest)
    )
    return Instances(made, num_wanted, TemplateCosts(num_microbatches, 100_000, link or Link(), 0.0))


@pytest.mark.parametrize(
    ("stages", "wanted"),
    [
        ([7], 28),
        # All stages, 6, then 2S + k + 1 = 2*3 + 2 + 1 times the slowest, 18, and the last stage, 2.
        ([2, 2, 2], 26),
        # All stages, 6, then (2*3 + 0 + 1) * 3, and everything from stage 0 on, 6.
        ([3, 2, 1], 33),
        # Of two slowest stages the last counts: 8 + (2*3 + 1 + 1) * 3 + 5.
        ([3, 3, 2], 37),
    ],
)
def test_the_planned_time_follows_the_published_formula(stages, wanted):
    assert planned_time(stages) == wanted


@settings(max_examples=150, deadline=None)
@given(LATENCIES, st.data())
def test_a_cut_is_the_best_of_all_cuts(latencies, data):
    num_stages = data.draw(st.integers(1, len(latencies)))
    found = cut_layers(latencies, num_stages)
    assert (len(found), sum(found), min(found) >= 1) == (num_stages, len(latencies), True)
    best = min(planned_time(stage_latencies(latencies, every)) for every in all_cuts(len(latencies), num_stages))
    assert planned_time(stage_latencies(latencies, found)) == best


def test_equal_layers_are_cut_equally():
    assert cut_layers((5,) * 24, 6) == (4,) * 6


def test_a_cut_prefers_the_slowest_stage_early():
    # 8 + (2*3 + 1 + 1) * 3 + 5 = 37; with the last slowest stage at the end, (2, 3, 3) or (3, 2, 3), it would be 38.
    assert cut_layers((1,) * 8, 3) == (3, 3, 2)


def test_all_templates_of_a_deep_model_are_cut_in_two_seconds():
    latencies = tuple(10_000_000 + 7919 * layer * layer % 5_000_000 for layer in range(100))
    start = process_time()
    for num_stages in range(1, 65):
        cut_layers(latencies, num_stages)
    with depends_on_load():
        assert process_time() - start < 2


def test_a_template_knows_its_slowest_stage_and_its_biggest():
    layers = [LayerCost(1, 2, 100, 0), LayerCost(1, 1, 7, 0), LayerCost(2, 3, 5, 0)]
    one, two, three = templates(layers, range(1, 4))
    assert (one.num_layers, one.slowest_ns, one.gradient_bytes) == ((3,), 10_000, 448)
    assert (two.num_layers, two.slowest_ns, two.gradient_bytes) == ((2, 1), 5_000, 428)
    assert (three.num_layers, three.slowest_ns, three.gradient_bytes) == ((1, 1, 1), 5_000, 400)


def test_the_smallest_size_holds_six_times_the_parameters_and_an_activation():
    layers = [LayerCost(1, 1, 10, 30), LayerCost(1, 1, 20, 50)]
    # 6 * 4 bytes * 30 parameters + 50 bytes.
    assert fewest_nodes(layers, 770) == 1
    assert fewest_nodes(layers, 769) == 2
    assert fewest_nodes(layers, 100) == 8


@pytest.mark.parametrize(
    ("num_nodes", "fewest", "faults", "num_layers", "wanted"),
    [
        (32, 3, 3, 34, range(3, 24)),
        (32, 3, 3, 10, range(3, 11)),  # a node has at least a layer
        (11, 3, 3, 34, range(3, 6)),  # three pipelines at most, so that two faults are borne
        (4, 3, 3, 34, range(3, 5)),  # a single pipeline
    ],
)
def test_sizes_leave_room_for_the_pipelines_that_bear_faults(num_nodes, fewest, faults, num_layers, wanted):
    assert template_sizes(num_nodes, fewest, faults, num_layers) == wanted


def test_nodes_that_hold_no_pipeline_have_no_sizes():
    assert not template_sizes(2, 3, 3, 34)
    assert not template_sizes(32, 5, 3, 4)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(0, 3), st.integers(1, 40))
def test_every_number_of_nodes_is_the_sum_of_enough_sizes(fewest, faults, num_nodes):
    sizes = template_sizes(num_nodes, fewest, faults, num_nodes)
    faults = tolerated_faults(num_nodes, fewest, faults)
    assume(len(sizes) and sizes[-1] >= 2 * fewest - 1)
    # Which totals so many pipelines reach, by adding one after the other.
    reached, totals = set(), {0}
    for number in range(1, num_nodes + 1):
        totals = {total + size for total in totals for size in sizes if total + size <= num_nodes}
        reached |= totals if number > faults else set()
    assert reached >= set(range((faults + 1) * fewest, num_nodes + 1))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.integers(0, 5), st.integers(0, 2), st.integers(1, 20))
def test_the_best_pipelines_use_all_nodes_that_sizes_can_sum_up_to(fewest, more, faults, num_nodes):
    given_ = hand_made([100 // size for size in range(fewest, fewest + more + 1)], num_wanted=faults + 1, fewest=fewest)
    sums = {0}
    for _ in range(num_nodes):
        sums |= {total + size for total in sums for size in given_.sizes if total + size <= num_nodes}
    found = given_.best(num_nodes)
    assert sum(found) == max(sums)
    assert set(found) <= set(given_.sizes)
    assert len(found) >= min(faults + 1, sum(found) // fewest)


def all_splits(num_microbatches, num_pipelines):
    return (split for split in product(range(num_microbatches + 1), repeat=num_pipelines) if sum(split) == num_microbatches)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=3), st.integers(1, 8))
def test_the_batch_is_split_so_that_the_slowest_pipeline_is_fastest(pipelines, num_microbatches):
    splits = all_splits(num_microbatches, len(pipelines))
    best = min(
        max((number - 1) * latency - hidden for number, (latency, hidden) in zip(split, pipelines, strict=True) if number)
        for split in splits
    )
    latencies, hidden = (np.array([[*column]]) for column in zip(*pipelines, strict=True))
    assert slowest_ns(latencies, np.ones_like(latencies), hidden, num_microbatches) == [best]


def test_a_faster_pipeline_takes_more_of_the_batch():
    # 8 and 4 micro-batches: 100 + 7 * 10 against 100 + 3 * 20; with 7 and 5 it would be 180.
    assert hand_made([20, 10]).iteration_us((2, 1)) == 170


def test_a_schedule_without_bubbles_hides_a_part_of_fill_and_drain():
    assert hand_made([20, 10], hidden=80).iteration_us((2, 1)) == 90


def test_pipelines_reduce_the_gradients_of_the_biggest_stage():
    # 6 micro-batches each: 100 + 5 * 20. A ring of two: 2 messages of 3 µs and half of 1000 bytes at 10 bytes/µs.
    alone = hand_made([20], gradient_bytes=1000, link=Link(3, 10))
    assert alone.iteration_us((1, 1)) == 200 + 2 * (3 + 50)
    assert alone.iteration_us((1,)) == 100 + 11 * 20


def test_an_iteration_is_the_profiles_own_with_the_same_cut():
    job = SimulatedJob(ModelSpec("x", 8, 1024, 16, vocabulary=1), parse_gpu("a100-80"), Shape(4, 1, 8))
    profile = job.profile(1)
    stage = profile.stages[0]
    one_f_one_b = 8 * (stage.forward_us + stage.fused_us) + profile.reduce_us(0, 4) + stage.optimizer_us
    assert instances(job, 3).iteration_us((1, 1, 1, 1)) == pytest.approx(one_f_one_b, rel=1e-3)


def test_multisets_are_all_sums_of_sizes():
    wanted = {tuple(sorted(sizes)) for number in range(1, 7) for sizes in combinations_with_replacement(range(2, 6), number)}
    wanted = {sizes for sizes in wanted if sum(sizes) == 12}
    found = list(multisets(12, range(2, 6), 12))
    assert {tuple(sorted(size for size, number in layout for _ in range(number))) for layout in found} == wanted
    assert len(found) == len(wanted) == num_multisets(12, range(2, 6), len(wanted))
    assert num_multisets(12, range(2, 6), len(wanted) - 1) > len(wanted) - 1
    assert {layout for layout in found if len(layout) <= 2} == set(of_two_sizes(12, range(2, 6)))
    few = [layout for layout in found if sum(number for _, number in layout) <= 3]
    assert set(multisets(12, range(2, 6), 3)) == set(few)


def test_an_exchange_moves_nodes_from_one_pipeline_to_another():
    assert set(exchanges(((4, 1), (2, 1)), range(1, 6))) == {((3, 2),), ((4, 1), (2, 1)), ((5, 1), (1, 1))}


@st.composite
def jobs(draw, most_nodes=24):
    model = ModelSpec(
        "random",
        draw(st.integers(6, 40)),
        128 * draw(st.integers(4, 40)),
        4,
        vocabulary=draw(st.sampled_from([1000, 51200])),
    )
    gpu = parse_gpu(draw(st.sampled_from(["a100-80", "h200", "a100-80,inter=10Gbit/s", "a100-80,memory=10GB"])))
    num_stages = draw(st.integers(1, 6))
    shape = Shape(draw(st.integers(1, most_nodes // num_stages)), num_stages, draw(st.integers(1, 40)))
    return SimulatedJob(model, gpu, shape)


@settings(max_examples=60, deadline=None)
@given(jobs(), st.integers(0, 3), st.sampled_from(FaultFreeSchedule), st.data())
def test_a_bounded_search_finds_the_best_of_all_but_for_one_percent(job, faults, schedule, data):
    given_ = instances(job, faults, schedule)
    num_nodes = data.draw(st.integers(1, job.num_nodes))
    all_, bounded = given_.best(num_nodes, most_layouts=10**9), given_.best(num_nodes, most_layouts=0)
    assert sum(all_) == sum(bounded)
    if all_:
        assert given_.iteration_us(all_) <= given_.iteration_us(bounded) <= 1.01 * given_.iteration_us(all_)


@settings(max_examples=30, deadline=None)
@given(jobs(most_nodes=9), st.integers(0, 3), st.sampled_from(FaultFreeSchedule))
def test_no_other_pipelines_are_faster_than_the_best(job, faults, schedule):
    given_ = instances(job, faults, schedule)
    found = given_.best(job.num_nodes)
    assume(found)
    others = (
        sizes
        for number in range(len(found), sum(found) + 1)
        for sizes in combinations_with_replacement(given_.sizes, number)
        if sum(sizes) == sum(found)
    )
    assert given_.iteration_us(found) <= min(map(given_.iteration_us, others))


def test_thousands_of_nodes_are_instantiated_in_a_second():
    given_ = instances(SimulatedJob.of("gpt3-6.7b", "a100-80", Shape(256, 8, 32)), 3)
    start = process_time()
    found = given_.best(2048)
    assert sum(found) == 2048
    with depends_on_load():
        assert process_time() - start < 1
