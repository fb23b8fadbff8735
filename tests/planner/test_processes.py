"""Processes that work for another one end with it, whatever ends it."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import os, sys, time
from recycle.sim.parallel import spread

def wait(number):
    with open(sys.argv[1], "a") as stream:
        stream.write(f"{os.getpid()}\\n")
    time.sleep(60)
    return number

if __name__ == "__main__":
    spread(wait, [1, 2], num_processes=2)
"""


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stream:
        return stream.read().split(") ")[1][0] != "Z"


def until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="asks Linux's /proc who is there")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_no_process_is_left_behind_however_its_parent_ends(end, tmp_path):
    script, pids = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    pids.touch()
    parent = subprocess.Popen([sys.executable, str(script), str(pids)], stderr=subprocess.DEVNULL, start_new_session=True)
    children = []
    try:
        assert until(lambda: len(pids.read_text().split()) == 2, 40)
        children = [int(pid) for pid in pids.read_text().split()]
        parent.send_signal(end)
        parent.wait(20)
        assert until(lambda: not any(map(is_there, children)), 10)
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        parent.kill()
        parent.wait(10)
