"""The server from which workers are forked: they keep their memory, and whoever starts them is left as it was."""

import os
import resource

import pytest
import torch

from recycle.runtime.forkserver import forking

pytestmark = pytest.mark.timeout(120)
BLOCK = 2**20


def count_faults(mouth):
    """Tell how many page faults it takes to fill and free the same memory over and over, once it has been there."""

    def fill():
        blocks = [torch.ones(BLOCK) for _ in range(4)]
        return sum(float(block[0]) for block in blocks)

    torch.set_num_threads(1)
    fill()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        fill()
    mouth.send(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


def test_a_worker_gets_the_memory_that_it_freed_without_a_fault_for_every_page():
    before = dict(os.environ)
    context = forking([])
    assert dict(os.environ) == before
    ear, mouth = context.Pipe(duplex=False)
    process = context.Process(target=count_faults, args=(mouth,), daemon=True)
    process.start()
    assert ear.poll(60)
    num_pages = 20 * 4 * BLOCK * 4 // resource.getpagesize()
    assert ear.recv() < num_pages / 10
    process.join()
