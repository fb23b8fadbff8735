"""Titles of processes: what `ps` shows."""

import subprocess
import sys

TITLED = """
from recycle.host.process_title import set_title
set_title("recycle worker W1_2 of the job")
print(open("/proc/self/cmdline").read().rstrip("\\0 "))
"""
WITHOUT = "import sys; sys.modules['setproctitle'] = None\n"


def test_the_title_is_what_ps_shows() -> None:
    shown = subprocess.run([sys.executable, "-c", TITLED], capture_output=True, text=True, timeout=60, check=True).stdout
    assert shown == "recycle worker W1_2 of the job\n"


def test_the_short_name_has_no_space_at_which_a_job_manager_could_stumble() -> None:
    script = TITLED + 'print(open("/proc/self/comm").read())'
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout
    assert shown.split("\n")[1] == "recycle-worker-"


def test_without_the_package_the_command_line_stays() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", WITHOUT + TITLED], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert shown.startswith(sys.executable)
