"""Which links workers get: those over the host wherever no GPU computes, or nobody else is there."""

import pytest
import torch
import torch.distributed as dist

from recycle.core.cluster import Worker
from recycle.runtime.job import Job
from recycle.runtime.launch.configure import worker_spec
from recycle.runtime.transport.gloo import GlooTransport, GroupView
from recycle.runtime.transport.select import make_transport
from tests.plans import make_1f1b_plan
from tests.runtime.jobs import Numbers, adamw, loss, make_stages
from tests.runtime.transport.worker_threads import at_once, ends

pytestmark = pytest.mark.timeout(60)


def make_kit():
    stages = make_stages(2)
    job = Job(make_1f1b_plan(2, 2, 2), stages, Numbers(), loss, adamw, 1)
    return worker_spec(job)


def test_workers_on_cores_have_links_over_the_host():
    kit, workers = make_kit(), [Worker(0, 0), Worker(0, 1)]

    def made(worker, store):
        return make_transport(kit, store, GroupView(worker, workers, epoch=1), (), torch.device("cpu"))

    links = at_once(*(lambda pair=pair: made(*pair) for pair in zip(workers, ends(2), strict=True)))
    try:
        assert [type(each) for each in links] == [GlooTransport] * 2
    finally:
        for each in links:
            each.abort()
            each.close()


def test_one_worker_alone_on_a_gpu_has_nobody_to_share_its_memory_with():
    address = GroupView(Worker(0, 0), [Worker(0, 0)])
    links = make_transport(make_kit(), dist.HashStore(), address, (), torch.device("cuda", 0))
    assert type(links) is GlooTransport
    links.abort()
    links.close()
