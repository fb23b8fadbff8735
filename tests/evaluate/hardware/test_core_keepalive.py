"""The core keepalive: one process a core, at the lowest priority, which ends with its parent."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from recycle.evaluate.hardware import core_keepalive
from recycle.evaluate.hardware.core_keepalive import are_cores_migrated, cores_kept_awake
from recycle.profiling.machine import usable_cores

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


def busy_s(pid):
    """The processor time that a process has taken."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def grows(pid):
    before = busy_s(pid)
    return wait_until(lambda: busy_s(pid) > before + 0.02)


@contextmanager
def started():
    """The choice of cores, and the process that keeps each core awake."""
    before = set(children(os.getpid()))
    with cores_kept_awake() as choose_cores:
        pids = set(children(os.getpid())) - before
        assert wait_until(lambda: all(map(is_spinning, pids)))
        yield choose_cores, {core: pid for pid in pids for core in os.sched_getaffinity(pid)}
    assert not set(children(os.getpid())) & pids


def test_every_core_has_a_process_of_the_lowest_priority_until_the_context_ends():
    with started() as (_, of_core):
        assert sorted(of_core) == sorted(usable_cores())
        assert all(map(grows, of_core.values()))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_the_cores_of_workers_are_kept_awake_and_others_take_no_time():
    with started() as (choose_cores, of_core):
        own, *others = usable_cores()
        assert list(choose_cores(1)) == [own]
        assert grows(of_core[own])
        time.sleep(0.1)  # until the last of them rests
        slept = {core: busy_s(of_core[core]) for core in others}
        assert grows(of_core[own])
        assert {core: busy_s(of_core[core]) for core in others} == slept
        for num_workers in (0, len(of_core) + 1):  # no workers, or more than cores: all are kept awake
            assert list(choose_cores(num_workers)) == []
            assert all(map(grows, of_core.values()))
            choose_cores(1)


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


def test_workers_have_their_cores_where_no_process_may_keep_them_awake(monkeypatch):
    monkeypatch.setattr(core_keepalive, "_KEEPALIVE", "raise SystemExit")
    num = len(os.sched_getaffinity(0))
    with cores_kept_awake() as choose_cores:
        for _ in range(3):
            assert list(choose_cores(num)) == list(usable_cores())
            time.sleep(0.1)


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
