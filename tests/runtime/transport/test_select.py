"""The choice of a transport: gloo wherever no GPU computes, or a worker is alone."""

import pytest
import torch
import torch.distributed as dist

from recycle.core.cluster import Worker
from recycle.runtime.job import Job
from recycle.runtime.launch.configure import worker_spec
from recycle.runtime.transport.gloo import GlooTransport
from recycle.runtime.transport.specs import GroupView
from recycle.runtime.worker.epoch_setup import WorkerProgram, connect
from tests.plans import make_1f1b_plan
from tests.runtime.jobs import Numbers, adamw, loss, make_stages
from tests.runtime.transport.worker_threads import at_once, rendezvous_of

pytestmark = pytest.mark.timeout(60)
NO_PROGRAM = WorkerProgram((), 0, False)


def make_spec():
    stages = make_stages(2)
    job = Job(make_1f1b_plan(2, 2, 2), stages, Numbers(), loss, adamw, 1)
    return worker_spec(job)


def test_workers_on_cores_have_a_transport_over_gloo():
    spec, workers = make_spec(), [Worker(0, 0), Worker(0, 1)]

    def made(worker, store):
        return connect(spec, NO_PROGRAM, GroupView(worker, workers, epoch=1), store, torch.device("cpu"))

    transports = at_once(*(lambda pair=pair: made(*pair) for pair in zip(workers, rendezvous_of(2), strict=True)))
    try:
        assert [type(each) for each in transports] == [GlooTransport] * 2
    finally:
        for each in transports:
            each.abort()
            each.close()


def test_one_worker_alone_on_a_gpu_has_nobody_to_share_its_memory_with():
    view = GroupView(Worker(0, 0), [Worker(0, 0)])
    transport = connect(make_spec(), NO_PROGRAM, view, dist.HashStore(), torch.device("cuda", 0))
    assert type(transport) is GlooTransport
    transport.abort()
    transport.close()
