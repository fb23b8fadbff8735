"""The server from which workers are forked: they keep their memory, have one thread, and leave whoever starts them as it was."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recycle.runtime.launch.forkserver import fork_context

pytestmark = pytest.mark.timeout(120)
BLOCK = 2**20
NUM_PAGES = 20 * 4 * BLOCK * 4 // resource.getpagesize()
ROOT = Path(__file__).parents[3]


def count_faults(sender):
    """Tell how many page faults it takes to fill and free the same memory over and over, once it has been there."""

    def fill():
        blocks = [torch.ones(BLOCK) for _ in range(4)]
        return sum(float(block[0]) for block in blocks)

    torch.set_num_threads(1)
    fill()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        fill()
    sender.send(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


def test_a_worker_gets_the_memory_that_it_freed_without_a_fault_for_every_page():
    before = dict(os.environ)
    context = fork_context([])
    assert dict(os.environ) == before
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=count_faults, args=(sender,), daemon=True)
    process.start()
    assert receiver.poll(60)
    assert receiver.recv() < NUM_PAGES / 4
    process.join()


FAULTS_AND_THREADS = """
import os
import sys
from recycle.runtime.launch.forkserver import configure_process
configure_process()
from multiprocessing import Pipe
from tests.runtime.launch.test_forkserver import count_faults
receiver, sender = Pipe(duplex=False)
count_faults(sender)
import torch
torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64), torch.ones(64))
print(receiver.recv(), len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1)
"""


def test_so_does_one_that_was_started_by_itself_and_it_computes_in_one_thread():
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", FAULTS_AND_THREADS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, cwd=ROOT, env=environment)
    num_faults, num_threads = map(int, done.stdout.split())
    assert num_faults < NUM_PAGES / 4
    assert num_threads == 1
