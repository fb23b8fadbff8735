"""The choice of a transport: by where all workers of an epoch compute, once for all of them."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.runtime.job import Job
from recycle.runtime.launch.configure import worker_spec
from recycle.runtime.options import AUTO, GLOO, IPC, NCCL
from recycle.runtime.transport.gloo import GlooTransport
from recycle.runtime.transport.select import TransportChoice, WorkerDevice, agree_on_transport, choose_transport
from recycle.runtime.transport.specs import GroupView, TransportBroken
from recycle.runtime.worker.epoch_setup import WorkerProgram, connect
from tests.plans import make_1f1b_plan
from tests.runtime.jobs import Numbers, adamw, loss, make_stages
from tests.runtime.transport.worker_threads import at_once, rendezvous_of

pytestmark = pytest.mark.timeout(60)
NO_PROGRAM = WorkerProgram((), 0, False)
WORKERS = [Worker(0, 0), Worker(0, 1), Worker(1, 0), Worker(1, 1)]
EACH = [WorkerDevice("north", "a"), WorkerDevice("north", "b"), WorkerDevice("south", "c"), WorkerDevice("south", "d")]
ONE = [WorkerDevice("north", "a")] * 4
SOME = [WorkerDevice("north", "a"), WorkerDevice("north", "a"), WorkerDevice("south", "c"), WorkerDevice("south", "d")]
CPU = [WorkerDevice("north")] * 4
BOTH = [*EACH[:3], WorkerDevice("south")]


@pytest.mark.parametrize(
    ("devices", "wanted", "kind", "warning"),
    [
        (CPU, AUTO, GLOO, ""),
        (CPU, GLOO, GLOO, ""),
        (EACH, AUTO, NCCL, ""),
        (EACH, NCCL, NCCL, ""),
        (EACH, GLOO, GLOO, ""),
        (EACH[:2], NCCL, NCCL, ""),
        (ONE, AUTO, IPC, ""),
        (ONE, IPC, IPC, ""),
        (ONE, GLOO, GLOO, ""),
        (ONE, NCCL, NCCL, "W0_0, W0_1, W1_0 and W1_1 share GPU a of north"),
        (SOME, AUTO, GLOO, "W0_0 and W0_1 share GPU a of north, and others have another one; give each worker a GPU of its own"),
        (SOME, NCCL, NCCL, "W0_0 and W0_1 share GPU a of north"),
        (SOME, GLOO, GLOO, ""),
        (BOTH, AUTO, GLOO, ""),
        (EACH[:1], AUTO, GLOO, ""),
        (EACH[:1], NCCL, GLOO, ""),
        (EACH[:1], IPC, GLOO, ""),
    ],
)
def test_the_fastest_that_connects_all_or_the_one_that_is_wanted(devices, wanted, kind, warning):
    choice = choose_transport(dict(zip(WORKERS, devices, strict=False)), wanted)
    assert choice.kind == kind
    assert warning in choice.warning
    assert bool(choice.warning) == bool(warning)
    assert choice.shares_gpus == (kind == NCCL and bool(warning))


@pytest.mark.parametrize(
    ("devices", "wanted", "says"),
    [
        (CPU, NCCL, "the transport is nccl, which connects GPUs, but W0_0 computes on a CPU: write gloo or auto"),
        (BOTH, IPC, "the transport is ipc, which connects GPUs, but W1_1 computes on a CPU: write gloo or auto"),
        (EACH, IPC, "the transport is ipc, which connects workers on one GPU, but they have 4: write auto"),
    ],
)
def test_one_that_cannot_connect_them_is_refused(devices, wanted, says):
    with pytest.raises(UserError) as refused:
        choose_transport(dict(zip(WORKERS, devices, strict=True)), wanted)
    assert str(refused.value) == says


def agree(store, worker, device, wanted=AUTO, epoch=1):
    return agree_on_transport(store, GroupView(worker, WORKERS, epoch), device, wanted)


def test_the_first_worker_chooses_for_all():
    """Even if the others were told something else."""
    stores, wanted = rendezvous_of(4), [GLOO, AUTO, AUTO, NCCL]
    calls = zip(stores, WORKERS, EACH, wanted, strict=True)
    assert at_once(*(lambda call=call: agree(*call) for call in calls)) == [TransportChoice(GLOO)] * 4


def test_what_was_said_in_another_epoch_does_not_count():
    store = dist.HashStore()
    for epoch, devices in ((1, EACH), (2, ONE)):
        calls = [(store, *pair, AUTO, epoch) for pair in zip(WORKERS, devices, strict=True)]
        chosen = at_once(*(lambda call=call: agree(*call) for call in calls))
        assert {choice.kind for choice in chosen} == {NCCL if epoch == 1 else IPC}


def test_nobody_chooses_before_all_have_said_where_they_are():
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(TransportBroken, match="timeout"):
        agree(store, WORKERS[0], EACH[0])


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
        assert [(type(each), choice) for each, choice in transports] == [(GlooTransport, TransportChoice(GLOO))] * 2
    finally:
        for each, _ in transports:
            each.abort()
            each.close()
