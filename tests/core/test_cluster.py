"""Workers, shapes and clusters: text forms, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import UserError

NUMBERS = st.integers(0, 5000)


@given(NUMBERS, NUMBERS)
def test_a_worker_survives_its_text_form(pipeline, stage):
    worker = Worker(pipeline, stage)
    assert Worker.parse(str(worker)) == worker


def test_a_worker_is_written_pipeline_first():
    assert str(Worker(1, 2)) == "W1_2"
    assert Worker.parse(" W1_2 ") == Worker(pipeline=1, stage=2)


@pytest.mark.parametrize("text", ["", "W1", "w1_2", "1_2", "W1_2_3", "W-1_2", "W1_", "W1 _2"])
def test_a_text_that_is_no_worker_is_refused_by_name(text):
    with pytest.raises(UserError, match="is not a worker") as caught:
        Worker.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("numbers", [(0, 4, 6), (3, 0, 6), (3, 4, -1), (3, 4, 1.5), (3, "4", 6)])
def test_a_shape_needs_whole_numbers_of_at_least_one(numbers):
    with pytest.raises(UserError, match="must be a whole number of at least 1"):
        Shape(*numbers)


def test_a_shape_counts_workers_and_chains():
    shape = Shape(3, 4, 6)
    assert (shape.num_workers, shape.num_chains) == (12, 18)
    assert [str(worker) for worker in shape.workers()][:5] == ["W0_0", "W0_1", "W0_2", "W0_3", "W1_0"]


def test_peers_of_a_dead_worker_are_the_live_pipelines_of_its_stage():
    cluster = Cluster.of(Shape(3, 4, 6), [Worker(1, 2)])
    assert cluster.live_pipelines(2) == [0, 2]
    assert cluster.live_pipelines(1) == [0, 1, 2]
    assert [cluster.num_live(stage) for stage in range(4)] == [3, 3, 2, 3]
    assert cluster.num_failed == (0, 0, 1, 0)
    assert not cluster.is_live(Worker(1, 2))
    assert Worker(1, 2) not in cluster.live_workers()
    assert len(cluster.live_workers()) == 11


@pytest.mark.parametrize("worker", [Worker(3, 0), Worker(0, 4), Worker(-1, 0), Worker(0, -1)])
def test_a_failed_worker_outside_the_cluster_is_refused_by_name(worker):
    with pytest.raises(UserError, match="is not a worker of this cluster: pipelines are 0 to 2, stages 0 to 3") as caught:
        Cluster.of(Shape(3, 4, 6), [worker])
    assert str(worker) in str(caught.value)


def test_a_failure_named_twice_is_refused():
    with pytest.raises(UserError, match="W1_2 is named as failed twice"):
        Cluster.of(Shape(3, 4, 6), [Worker(1, 2), Worker(0, 0), Worker(1, 2)])


def test_a_stage_without_a_live_worker_cannot_go_on():
    with pytest.raises(UserError, match=r"stage 1 has no live worker: all 2 of its peers failed.*checkpoint"):
        Cluster.of(Shape(2, 2, 4), [Worker(0, 1), Worker(1, 1)])


def test_one_pipeline_tolerates_no_failure_at_all():
    with pytest.raises(UserError, match="stage 0 has no live worker"):
        Cluster.of(Shape(1, 2, 4), [Worker(0, 0)])
