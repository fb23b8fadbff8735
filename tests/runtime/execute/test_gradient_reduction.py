"""A gradient may be reduced in any number of buckets: ties, skipped and clipped steps come out as those of the reference."""

import gc
import weakref
from functools import partial

import pytest
import torch

from recycle.runtime.compute.state_digests import digest
from recycle.runtime.execute import gradient_reduction
from recycle.runtime.execute.buckets import make_buckets
from recycle.runtime.job import Job
from recycle.runtime.options import TrainOptions
from tests.runtime.jobs import Explodes, Numbers, adamw, greedy_plan, loss, small_stages, tied_stages
from tests.runtime.reference_executor import ReferenceExecutor
from tests.runtime.transport.worker_threads import train_in_threads

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(60)
STEPS, SEED = 4, 5
PLAN = greedy_plan((2, 2, 2))


@pytest.fixture(params=[1, 2000])
def _small_buckets(request, monkeypatch):
    monkeypatch.setattr(gradient_reduction, "make_buckets", partial(make_buckets, bucket_bytes=request.param))


CASES = {
    "exact": {"is_exact": True},
    "in floating point": {},
    "clipped": {"is_exact": True, "max_norm": 0.05},
    "a step that is skipped": {"is_exact": True, "samples": Explodes(2)},
    "tied": {"is_exact": True, "stages": tied_stages(2)},
}


@pytest.mark.usefixtures("_small_buckets")
@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_reference(case):
    options = dict(CASES[case])
    samples, stages = options.pop("samples", Numbers()), options.pop("stages", small_stages(2))
    found = train_in_threads(Job(PLAN, stages, samples, loss, adamw, STEPS, options=TrainOptions(SEED, **options)))
    reference = ReferenceExecutor(PLAN, stages, samples, loss, adamw, seed=SEED, **options)
    for step in range(STEPS):
        reference.iterate(step)
    assert found == [digest(reference.workers[row.worker].stage.module) for row in PLAN.rows]


@pytest.mark.usefixtures("_small_buckets")
def test_a_stage_is_freed_with_its_trainer():
    """A GPU would run out of memory before Python looks for cycles."""
    stages = []
    gc.disable()
    try:
        train_in_threads(
            Job(PLAN, small_stages(2), Numbers(), loss, adamw, STEPS, options=TrainOptions(SEED)),
            leave=lambda trainer: stages.append(weakref.ref(trainer.executor.stage)),
        )
        assert [stage() for stage in stages] == [None] * 4
    finally:
        gc.enable()
