"""Keepalive for the workers' cores of a virtual machine: a process of the lowest priority keeps each of them busy.

An idle virtual core sleeps, and when it wakes up its host may migrate it, often onto a busy physical core, until the host
rebalances a second or two later. Workers that wait for each other many times in an iteration are then slower at random, by a
quarter or by half. A core that never sleeps is migrated less. The keepalive process yields at once to any other process.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from recycle.profiling.machine import a_core_each, usable_cores
from recycle.profiling.worker_pool import ChooseCores

_CPU_INFO, _QUOTA = Path("/proc/cpuinfo"), Path("/sys/fs/cgroup/cpu.max")
_SPIN, _REST = b"spin\n", b"rest\n"
# It rests until it is told to spin, and ends when its parent ends, even if the parent is killed: its input ends then.
_KEEPALIVE = """
import os, select, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
is_spinning = False
while True:
    if is_spinning and not select.select([0], [], [], 0)[0]:
        for _ in range(10_000):
            pass
        continue
    told = os.read(0, 4096).decode().split()
    if not told:
        break
    is_spinning = told[-1] == 'spin'
"""


def are_cores_migrated() -> bool:
    """Whether the cores belong to a hypervisor, which only x86 reports, and have no CPU quota that a keepalive would use up."""
    has_quota = _QUOTA.exists() and not _QUOTA.read_text(encoding="utf-8").startswith("max")
    return _CPU_INFO.exists() and " hypervisor" in _CPU_INFO.read_text(encoding="utf-8") and not has_quota


@contextmanager
def cores_kept_awake() -> Iterator[ChooseCores]:
    """What chooses a core for each worker, and keeps these awake, or all if there are no workers, or more workers than cores."""
    cores = usable_cores()
    with ExitStack() as stack:
        told = {core: stack.enter_context(_keepalive(core)) for core in cores}

        def choose(num_workers: int) -> Sequence[int]:
            own = a_core_each(num_workers)
            for core, pipe in told.items():
                with suppress(OSError):  # it was not allowed to do its work, and has ended
                    pipe.write(_SPIN if core in own or not own else _REST)
            return own

        choose(0)
        yield choose


@contextmanager
def _keepalive(core: int) -> Iterator[IO[bytes]]:
    """A keepalive process on this core, by the pipe that tells it what to do."""
    command = [sys.executable, "-S", "-c", _KEEPALIVE, str(core)]
    # Unbuffered, so that nothing is left to be written to one that has ended; in a session of its own, because an interrupt is
    # for the parent, which ends it.
    with subprocess.Popen(
        command, bufsize=0, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        assert process.stdin is not None
        try:
            yield process.stdin
        finally:
            process.kill()
