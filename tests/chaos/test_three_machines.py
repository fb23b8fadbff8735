"""One job file on machines with an agent each, of which one fails: hosts are network namespaces. `make chaos` has more of it."""

import contextlib
import os
import shutil
import signal
import subprocess

import pytest

from tests.chaos.three_machines import EXAMPLES, Machines, Unexpected, alone

# The limits are for a machine that is ten times slower than usual.
STEPS, NUM_MACHINES, WORKERS_EACH, LIMIT_S = 60, 2, 3, 600.0
PROBE = "rcprobe"
# The job of the example, whose samples take a while until a file is there: so the job is not over before the machine is back.
JOB = """
import time
from dataclasses import replace
from pathlib import Path

exec(Path("{example}").read_text())
whole = job


class Paced(Bars):
    def __getitem__(self, number):
        if not Path("{flag}").exists():
            time.sleep(0.01)
        return super().__getitem__(number)


def job():
    return replace(whole(), dataset=Paced())
"""
pytestmark = pytest.mark.timeout(900)


def refusal():
    """Why there can be no such machines here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "ip (iproute2) or unshare (util-linux) is not installed"
    inside = ["ip", "netns", "exec", PROBE, "unshare", "--pid", "--fork", "--mount", "--mount-proc", "true"]
    link = ["ip", "link", "add", "rcprobe0", "type", "bridge"]
    for words in (["ip", "netns", "add", PROBE], inside, link):
        if (tried := subprocess.run(words, capture_output=True, text=True)).returncode:
            return f"this system refuses {' '.join(words[:3])}: {tried.stderr.strip()}"
    return ""


@pytest.fixture
def namespaces():
    reason = refusal()
    for words in (["netns", "del", PROBE], ["link", "del", "rcprobe0"]):
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(["ip", *words], capture_output=True)
    if reason:
        pytest.skip(reason)


@pytest.mark.usefixtures("namespaces")
def test_a_machine_is_cut_off_dies_and_comes_back_and_the_weights_are_those_of_one_machine(tmp_path):
    file, flag = tmp_path / "job.py", tmp_path / "go"
    file.write_text(JOB.format(example=EXAMPLES / "sequential.py", flag=flag))
    with contextlib.ExitStack() as stack:
        machines = Machines(file, STEPS, tmp_path, stack, NUM_MACHINES, WORKERS_EACH, LIMIT_S)
        try:
            machines.wait_for_steps(5)
            failing = machines.machines[1]
            failing.unplug()
            machines.wait_for_one_to_leave()
            failing.signal(signal.SIGKILL)
            failing.plug()
            failing.start(machines.log)
            machines.wait_for_all()
            flag.touch()
            weights = machines.finish()
        except Unexpected as problem:
            pytest.fail(f"{problem}\n{machines.words()}")
    assert weights == alone(file, STEPS, machines.num_workers)
