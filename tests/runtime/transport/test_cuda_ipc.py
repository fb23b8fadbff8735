"""CUDA IPC, as far as it can be tested without a GPU: which workers share a machine, and the slots of an inbox.

The inbox is in host memory here, and no other worker maps it; everything else is the transport's own.
"""

import os
import signal
import subprocess
import threading
from functools import reduce
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.host.process_lifetime import process_start, process_state
from recycle.runtime.boundary.boundary_spec import TensorSpec
from recycle.runtime.transport.gpu import cuda_ipc
from recycle.runtime.transport.gpu.cuda_ipc import BufferPool, CudaIpcTransport, SharedMemory, is_gone, own_process
from recycle.runtime.transport.specs import GroupView, TensorMessage
from tests.processes import wait_for
from tests.runtime.transport.worker_threads import at_once, rendezvous_of, transport_spec

pytestmark = pytest.mark.timeout(60)
WORKERS = [Worker(0, 0), Worker(0, 1), Worker(1, 0)]
OWN = Worker(0, 1)
ALIGNMENT = 256
# What stage 0 makes is of another size and type than what stage 1 makes; no size is a multiple of the alignment.
SPECS = {0: TensorSpec((3, 50), torch.bfloat16), 1: TensorSpec((2, 71), torch.float32)}
NUM_CHAINS = 5


class HostMemory:
    """Memory of a worker that no other worker can map."""

    device = torch.device("cpu")

    def open(self, purpose, name, size_bytes):
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def synchronize(self):
        pass


@pytest.fixture
def transport():
    """That of a worker that is alone."""
    view = GroupView(OWN, [OWN])
    made = CudaIpcTransport(dist.HashStore(), view, transport_spec(SPECS, NUM_CHAINS), HostMemory())
    yield made
    made.abort()
    made.close()


@pytest.fixture
def carrier(transport):
    return transport._carrier


def message(kind, chain):
    """One that reaches stage 1: an activation from the stage before, or a gradient from the one after."""
    sender = Worker(0, 0 if kind is Kind.F else 2)
    return TensorMessage(kind, OWN.stage, chain, sender, OWN, made_at=0, taken_at=0, is_of_warm_up=False)


def slots(carrier, rounds):
    """The bytes of the inbox that each message of these rounds has, as (start, end), in order."""
    found = []
    for round_, kind, chain in product(rounds, (Kind.F, Kind.I), range(NUM_CHAINS)):
        slot = carrier.slot(carrier.inbox, message(kind, chain), round_)
        start = slot.data_ptr() - carrier.inbox.data_ptr()
        found.append((start, start + slot.nbytes))
    return sorted(found)


@pytest.mark.parametrize("first", [0, 1, 6, 7])
def test_messages_of_two_rounds_in_a_row_lie_apart(carrier, first):
    found = slots(carrier, (first, first + 1))
    assert len(found) == 2 * 2 * NUM_CHAINS
    assert all(end <= start for (_, end), (start, _) in pairwise(found))


def test_every_message_lies_within_the_inbox_where_a_tensor_of_any_dtype_may_begin(carrier):
    found = slots(carrier, (0, 1))
    assert found[0][0] == 0
    assert found[-1][1] <= carrier.inbox.nbytes
    assert all(start % ALIGNMENT == 0 for start, _ in found)


def test_the_round_after_the_next_has_the_same_slots(carrier):
    assert slots(carrier, (0,)) == slots(carrier, (2,)) != slots(carrier, (1,))


@pytest.mark.parametrize(("kind", "spec"), [(Kind.F, SPECS[0]), (Kind.I, SPECS[1])])
def test_a_slot_has_the_spec_of_its_message(carrier, kind, spec):
    slot = carrier.slot(carrier.inbox, message(kind, NUM_CHAINS - 1), 0)
    assert (tuple(slot.shape), slot.dtype) == (spec.shape, spec.dtype)


def test_what_was_received_is_the_receivers_own(carrier):
    given = message(Kind.I, 2)
    slot = carrier.slot(carrier.inbox, given, 0)
    slot.fill_(7.0)
    received = carrier.unpack(given, torch.zeros(1, dtype=torch.uint8), 0)
    slot.fill_(8.0)
    assert torch.equal(received, torch.full(SPECS[1].shape, 7.0))


class MemoryOfOne(HostMemory):
    """The memory of workers that are threads of one process, by name."""

    def __init__(self, opened):
        self._opened = opened

    def open(self, purpose, name, size_bytes):
        return self._opened.setdefault(name, super().open(purpose, name, size_bytes))

    def map(self, name):
        wait_for(lambda: name in self._opened, 20)
        return self._opened[name]


@pytest.mark.parametrize("num_workers", [2, 3, 5])
def test_workers_get_the_sums_in_their_order_of_tensors_of_several_sizes_one_after_the_other(num_workers):
    workers, opened = [Worker(pipeline, 1) for pipeline in range(num_workers)], {}
    sizes = [20_000, 30_001, 20_000, 5, 20_000, 30_001, 30_001]  # the buffers of a size are used again and again
    generator = torch.Generator().manual_seed(3)  # no two tensors are alike: what is left in a buffer would be seen
    given = [[torch.randn(size, generator=generator) for size in sizes] for _ in workers]

    def run(worker, store):
        view = GroupView(worker, workers, epoch=1)
        transport = CudaIpcTransport(store, view, transport_spec(SPECS, NUM_CHAINS), MemoryOfOne(opened))
        tensors = [tensor.clone() for tensor in given[worker.pipeline]]
        for begun in [transport.reducer.begin(tensor) for tensor in tensors]:
            transport.reducer.wait(begun)
        at_end.wait()
        transport.abort()
        transport.close()
        return tensors

    at_end = threading.Barrier(num_workers)
    pairs = zip(workers, rendezvous_of(num_workers), strict=True)
    found = at_once(*(lambda pair=pair: run(*pair) for pair in pairs))
    for number, size in enumerate(sizes):
        first, *others = [given[worker.pipeline][number] for worker in workers]
        expected = reduce(torch.add, others, first)
        for tensors in found:
            if size > 5:  # the small one is summed by gloo, in an order of its own
                assert torch.equal(tensors[number], expected)
            else:
                torch.testing.assert_close(tensors[number], expected)


# Workers that wake up too late.


@pytest.fixture
def frozen():
    """The name of a process that is stopped, and the process."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        wait_for(lambda: process_state(process.pid) == "T", 10)
        yield f"{own_process().rsplit(' ', 2)[0]} {process.pid} {process_start(process.pid)}", process
        process.kill()


def allocate(size_bytes):
    return torch.zeros(size_bytes, dtype=torch.uint8)


def test_what_a_worker_writes_that_wakes_up_in_an_old_epoch_reaches_no_later_epoch(frozen):
    pool, (late, process) = BufferPool(), frozen
    old = pool.take("inbox", 64, [own_process(), late], allocate)
    later = [pool.take("inbox", 64, [own_process()], allocate) for _ in range(2)]
    process.send_signal(signal.SIGCONT)
    old.fill_(7)  # what it does when it wakes up
    assert [int(buffer.sum()) for buffer in later] == [0, 0]
    assert later[0].data_ptr() == later[1].data_ptr() != old.data_ptr()


def test_a_buffer_is_used_again_once_all_who_could_write_into_it_have_ended_or_have_left_the_epoch(frozen):
    clock = SimpleNamespace(now_s=100.0)
    pool, (late, process) = BufferPool(lambda: clock.now_s), frozen
    old = pool.take("inbox", 64, [own_process(), late], allocate)
    assert pool.take("inbox", 64, [own_process(), late], allocate) is old  # it takes part, so it has left the epoch before
    other = pool.take("inbox", 64, [own_process()], allocate)
    process.kill()
    process.wait()
    assert is_gone(late)
    assert pool.take("inbox", 64, [own_process()], allocate) is other  # the GPU may have copies of the dead process left
    clock.now_s += 10
    assert pool.take("inbox", 64, [own_process()], allocate) is old
    assert other is not old


@pytest.mark.parametrize("name", ["another-machine 1 2", "", "unknown"])
def test_a_process_that_cannot_be_seen_may_still_write(name):
    name = {"": own_process(), "unknown": f"{own_process().rsplit(' ', 1)[0]} "}.get(name, name)
    assert not is_gone(name)


def test_the_workers_of_an_epoch_know_the_processes_of_each_other(monkeypatch):
    store, taken = dist.HashStore(), []
    monkeypatch.setattr(cuda_ipc._pool, "take", lambda *args: taken.append(args) or torch.zeros(0))
    store.set("e3/process/W1_0", "another process")
    view = GroupView(WORKERS[0], [WORKERS[0], WORKERS[2]], epoch=3)
    SharedMemory(store, view, torch.device("cpu")).open("inbox", "W0_0", 0)
    assert taken[0][:3] == ("inbox", 0, [own_process(), "another process"])
