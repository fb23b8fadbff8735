"""Keepalive for the cores of a virtual machine: a process of the lowest priority keeps each core busy.

An idle virtual core sleeps, and when it wakes up its host may migrate it, often onto a busy physical core, until the host
rebalances a second or two later. Workers that wait for each other many times in an iteration are then slower at random, by a
quarter or by half. A core that never sleeps is migrated less. The keepalive process yields at once to any other process.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_CPU_INFO, _QUOTA = Path("/proc/cpuinfo"), Path("/sys/fs/cgroup/cpu.max")
# It ends when its parent ends, even if the parent is killed.
_SPIN = """
import os, sys
parent, core = map(int, sys.argv[1:])
os.sched_setaffinity(0, {core})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == parent:
    for _ in range(10_000):
        pass
"""


def are_cores_migrated() -> bool:
    """Whether the cores belong to a hypervisor, which only x86 reports, and have no CPU quota that a keepalive would use up."""
    has_quota = _QUOTA.exists() and not _QUOTA.read_text(encoding="utf-8").startswith("max")
    return _CPU_INFO.exists() and " hypervisor" in _CPU_INFO.read_text(encoding="utf-8") and not has_quota


@contextmanager
def cores_kept_awake() -> Iterator[None]:
    """Run a keepalive process on every core that this process may use."""
    with ExitStack() as stack:
        for core in sorted(os.sched_getaffinity(0)):
            command = [sys.executable, "-S", "-c", _SPIN, str(os.getpid()), str(core)]
            spinner = stack.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))  # quiet when interrupted
            stack.callback(spinner.kill)
        yield
