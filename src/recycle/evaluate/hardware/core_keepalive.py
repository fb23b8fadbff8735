"""Cores of a virtual machine that stay where they are: something of the lowest priority keeps each of them busy.

A virtual core that has nothing to do is put to sleep, and when it wakes up the host puts it wherever it likes: often beside
another busy one, until its balance is struck a second or two later. Workers that wait for each other many times in an iteration
then are slow by chance, one or the other, by a quarter or by half. A core that never sleeps is moved less. What keeps it
awake steps aside at once for anybody of the same session.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_CPU_INFO, _QUOTA = Path("/proc/cpuinfo"), Path("/sys/fs/cgroup/cpu.max")
# It ends with whoever started it, killed or not.
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
    """Whether cores are known to be a hypervisor's, as only x86 tells, and not paid for by the time that they are busy."""
    has_quota = _QUOTA.exists() and not _QUOTA.read_text(encoding="utf-8").startswith("max")
    return _CPU_INFO.exists() and " hypervisor" in _CPU_INFO.read_text(encoding="utf-8") and not has_quota


@contextmanager
def cores_kept_awake() -> Iterator[None]:
    """Keep every core that may be used awake."""
    with ExitStack() as stack:
        for core in sorted(os.sched_getaffinity(0)):
            command = [sys.executable, "-S", "-c", _SPIN, str(os.getpid()), str(core)]
            spinner = stack.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))  # quiet when interrupted
            stack.callback(spinner.kill)
        yield
