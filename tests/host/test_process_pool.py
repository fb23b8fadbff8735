"""Processes that work for another one end with it, whatever ends it."""

import os
import signal
import subprocess
import sys

import pytest

from tests.processes import ends_with

SCRIPT = """
import os, sys, time
from recycle.host.parallel_map import parallel_map

def wait(number):
    with open(sys.argv[1], "a") as stream:
        stream.write(f"{os.getpid()}\\n")
    time.sleep(60)
    return number

if __name__ == "__main__":
    parallel_map(wait, [1, 2], num_processes=2)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="asks Linux's /proc who is there")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_no_process_is_left_behind_however_its_parent_ends(end, tmp_path):
    script, pids = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    pids.touch()
    parent = subprocess.Popen([sys.executable, str(script), str(pids)], stderr=subprocess.DEVNULL, start_new_session=True)
    assert ends_with(parent, pids, 2, end)
