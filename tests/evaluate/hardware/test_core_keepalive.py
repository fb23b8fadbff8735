"""The core keepalive: one process a core, at the lowest priority, which ends with its parent."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recycle.evaluate.hardware import core_keepalive
from recycle.evaluate.hardware.core_keepalive import are_cores_migrated, cores_kept_awake

pytestmark = pytest.mark.timeout(60)


def children(pid):
    return [int(own) for own in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(is_so):
    for _ in range(400):
        if is_so():
            return True
        time.sleep(0.05)
    return False


def is_spinning(pid):
    return os.sched_getscheduler(pid) == os.SCHED_IDLE


def test_every_core_has_a_process_of_the_lowest_priority_until_the_context_ends():
    before = set(children(os.getpid()))
    with cores_kept_awake():
        spinners = set(children(os.getpid())) - before
        assert len(spinners) == len(os.sched_getaffinity(0))
        assert wait_until(lambda: all(map(is_spinning, spinners)))
        assert {core for pid in spinners for core in os.sched_getaffinity(pid)} == os.sched_getaffinity(0)
    assert not set(children(os.getpid())) & spinners


def test_the_processes_end_with_a_parent_that_is_killed():
    code = """import time
from recycle.evaluate.hardware.core_keepalive import cores_kept_awake
with cores_kept_awake():
    print('here', flush=True)
    time.sleep(60)"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "here\n"
        spinners = children(parent.pid)
        assert wait_until(lambda: all(map(is_spinning, spinners)))
        parent.kill()
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in spinners))


@pytest.mark.parametrize(
    ("cores", "quota", "are"),
    [
        ("flags\t: fpu hypervisor lahf_lm\n", None, True),
        ("flags\t: fpu hypervisor lahf_lm\n", "max 100000\n", True),
        ("flags\t: fpu hypervisor lahf_lm\n", "200000 100000\n", False),  # the keepalive would use up the CPU quota
        ("flags\t: fpu lahf_lm\n", None, False),
        (None, None, False),
    ],
)
def test_cores_are_migrated_if_they_belong_to_a_hypervisor_without_a_quota(cores, quota, are, tmp_path, monkeypatch):
    for name, text in (("_CPU_INFO", cores), ("_QUOTA", quota)):
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr(core_keepalive, name, path)
    assert are_cores_migrated() == are
