"""Whole layers that move: the best split against brute force and hand-made cases, and the copies that it takes."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle.core.cluster import Shape
from recycle.sim.job import SimulatedJob
from recycle.sim.systems.layer_moves import StageRoom, best_split, moved_layers, stage_room, transfer_us


def job_of(num_layers, num_stages, num_pipelines=4, vocabulary=1):
    model = f"layers={num_layers},hidden=1024,heads=16,sequence=1024,vocabulary={vocabulary}"
    return SimulatedJob.of(model, "a100-80", Shape(num_pipelines, num_stages, 4))


def slowest_us(job, split, speeds):
    embedding, layer, *_, head = (cost.forward_us + cost.backward_us for cost in job.layers)
    live = [stage for stage, speed in enumerate(speeds) if speed]
    extra = {live[0]: embedding}
    extra[live[-1]] = extra.get(live[-1], 0) + head
    return max((split[stage] * layer + extra.get(stage, 0)) / speeds[stage] for stage in live)


def all_splits(num_layers, live, num_stages):
    """Every split with a layer at least for each live stage, and none for the others."""
    for cuts in combinations(range(1, num_layers), len(live) - 1):
        parts = [end - start for start, end in zip((0, *cuts), (*cuts, num_layers), strict=True)]
        split = [0] * num_stages
        for stage, part in zip(live, parts, strict=True):
            split[stage] = part
        yield tuple(split)


@given(
    st.integers(4, 9),
    st.lists(st.sampled_from([0, 0.5, 1, 2, 2.6, 3, 4]), min_size=2, max_size=4),
    st.sampled_from([1, 50_000]),
    st.data(),
)
def test_the_best_split_is_that_of_brute_force(num_layers, speeds, vocabulary, data):
    job = job_of(num_layers, len(speeds), vocabulary=vocabulary)
    most = tuple(data.draw(st.integers(1, num_layers)) for _ in speeds)
    live = [stage for stage, speed in enumerate(speeds) if speed]
    fitting = [
        split
        for split in (all_splits(num_layers, live, len(speeds)) if live else ())
        if all(num <= limit for num, limit in zip(split, most, strict=True))
    ]
    found = best_split(job, StageRoom(tuple(speeds), most), job.base_layers)
    if not fitting:
        assert found is None
        return
    assert found in fitting
    best = min(slowest_us(job, split, speeds) for split in fitting)
    assert slowest_us(job, found, speeds) == pytest.approx(best)


@pytest.mark.parametrize(
    ("num_pipelines", "num_stages", "num_layers", "kept"), [(4, 8, 32, 4 / 5), (4, 8, 64, 8 / 9), (3, 4, 24, 6 / 7)]
)
def test_one_dead_worker_costs_what_whole_layers_allow(num_pipelines, num_stages, num_layers, kept):
    """With 4 of 4, 8 of 8 and 6 of 6 layers a stage: the stage gives up whole layers, until another has one more than before."""
    job = job_of(num_layers, num_stages, num_pipelines)
    whole = [num_pipelines] * num_stages
    room = StageRoom(tuple(map(float, whole)), (num_layers,) * num_stages)
    assert best_split(job, room, job.base_layers) == job.base_layers
    dead = [num_pipelines - (stage == 2) for stage in range(num_stages)]
    split = best_split(job, StageRoom(tuple(map(float, dead)), (num_layers,) * num_stages), job.base_layers)
    assert slowest_us(job, job.base_layers, whole) / slowest_us(job, split, dead) == pytest.approx(kept, rel=0.01)


def test_layers_go_to_the_nearest_stages():
    job = job_of(32, 8)
    room = StageRoom((4.0, 4.0, 4.0, 3.0, 4.0, 4.0, 4.0, 4.0), (32,) * 8)
    assert best_split(job, room, job.base_layers) == (4, 4, 5, 3, 4, 4, 4, 4)


def test_a_worker_receives_the_layers_of_its_new_range_that_it_did_not_hold():
    assert moved_layers((4, 4, 4), (4, 4, 4)) == 0
    assert moved_layers((4, 4, 4), (5, 3, 4)) == 1  # stage 0 receives layer 4
    assert moved_layers((4, 4, 4), (5, 4, 3)) == 1  # and stage 1 layer 8
    assert moved_layers((4, 4, 4), (6, 0, 6)) == 2
    assert moved_layers((2, 2, 8), (4, 4, 4)) == 4  # stage 1 held 2 and 3, and has 4 to 7


def test_a_transfer_takes_the_bytes_of_its_layers_over_the_link():
    job = job_of(32, 8)
    link = job.profile().peer_link
    parameters = 12 * 1024**2 + 13 * 1024
    assert job.layer_state_bytes == 14 * parameters
    assert transfer_us(job, job.profile(), (4,) * 8, (5, 3, *(4,) * 6)) == link.time_us(14 * parameters)
    assert transfer_us(job, job.profile(), (4,) * 8, (4,) * 8) == 0


def test_layers_that_do_not_fit_in_the_memory_do_not_move_there():
    job = job_of(32, 8)
    room = stage_room(job, [4.0] * 8, [1.0] * 8, [1] * 8)
    layer = job.layers[1]
    each = 18 * layer.num_parameters + layer.activation_bytes
    assert room.most_layers[3] == int(job.gpu.memory_bytes // each)
    twice = stage_room(job, [4.0] * 8, [2.0] * 8, [4] * 8)
    assert twice.most_layers[3] == int(job.gpu.memory_bytes // (each + 7 * layer.activation_bytes))
