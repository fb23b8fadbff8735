"""A folder's lock: one process at a time, and never longer than it lives."""

import os
import signal
import subprocess
import sys

import pytest

from recycle.core.errors import FileProblem
from recycle.host.folder_lock import locked

HOLDS = """
import sys, time
from pathlib import Path
from recycle.host.folder_lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_another_process_is_refused_until_the_first_one_is_dead(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(FileProblem, match="is in use by another run: wait until"), locked(tmp_path):
            pass
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        with locked(tmp_path):
            pass
    assert os.listdir(tmp_path) == []


def test_the_end_of_another_process_is_waited_for(tmp_path, monkeypatch):
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "locked\n"
        waits = []

        def end_holder(seconds):
            waits.append(seconds)
            holder.kill()
            holder.wait()

        monkeypatch.setattr("recycle.host.folder_lock.time.sleep", end_holder)
        with locked(tmp_path, wait_s=60):
            monkeypatch.undo()
        assert len(waits) == 1


def test_a_lock_is_released_after_its_block_and_after_an_error(tmp_path):
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), locked(tmp_path):
            raise ZeroDivisionError
    with locked(tmp_path), pytest.raises(FileProblem, match="in use"), locked(tmp_path):
        pass


def test_a_folder_that_is_not_there_is_left_to_others_to_complain_about(tmp_path):
    with locked(tmp_path / "nowhere"):
        assert os.listdir(tmp_path) == []
