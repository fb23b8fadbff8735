"""Real processes play a plan: the same weights as in one process, rows in order, and nobody is left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import recycle
from recycle.runtime.launch import WorkerFailed, launch
from recycle.runtime.solo import Solo
from recycle.runtime.worker import Settings
from tests.processes import ends_with
from tests.runtime.jobs import Fails, Numbers, adamw, loss, make_stages

pytestmark = pytest.mark.timeout(180)


def plan(fail, techniques="adaptive,decoupled,staggered"):
    return recycle.solve(recycle.problem(2, 3, 4, fail=fail, costs=(10, 13, 9), comm=1, techniques=techniques), "greedy")


def in_one_process(made, is_exact, max_norm):
    job = Solo(made, make_stages(3, 0.1), Numbers(), loss, adamw, seed=5, is_exact=is_exact, max_norm=max_norm)
    return [job.iterate(step) for step in range(3)], job.weights_sha256()


@pytest.mark.parametrize("fail", ["", "W1_1", "W0_0,W1_2"])
def test_processes_compute_what_one_process_computes_bit_for_bit(fail):
    made, heard = plan(fail), []
    settings = Settings(num_steps=3, seed=5, is_exact=True, max_norm=0.05)
    trained = launch(made, make_stages(3, 0.1), Numbers(), loss, adamw, settings, heard.append)
    assert (trained.losses, trained.weights_sha256) == in_one_process(plan(""), True, 0.05)
    rows = {row.worker: row for row in made.rows}
    assert {(event.worker, event.iteration) for event in heard} == {(worker, step) for worker in rows for step in range(3)}
    for event in heard:
        kinds = [op[1] for op, _, _ in event.spans]
        assert "".join(kinds) == rows[event.worker].kinds
        assert all(begin <= end for _, begin, end in event.spans)
    assert not multiprocessing.active_children()


def test_a_worker_that_fails_says_its_last_words_and_all_are_ended():
    with pytest.raises(WorkerFailed, match="the disk is gone"):
        launch(plan(""), make_stages(3), Fails(), loss, adamw, Settings(num_steps=3))
    assert not multiprocessing.active_children()


def test_a_worker_that_is_killed_is_named_or_its_peers_say_that_it_is_gone():
    def kill_one(event):
        if event.iteration == 1:
            victims = [child for child in multiprocessing.active_children() if child.name == "W0_1"]
            for victim in victims:
                os.kill(victim.pid, signal.SIGKILL)

    with pytest.raises(WorkerFailed, match=r"W0_1 ended with exit code -9|cannot go on"):
        launch(plan(""), make_stages(3), Numbers(), loss, adamw, Settings(num_steps=2000), kill_one)
    assert not multiprocessing.active_children()


SCRIPT = """
import multiprocessing, sys
import recycle
from recycle.runtime.launch import launch
from recycle.runtime.worker import Settings
from tests.runtime.jobs import Numbers, adamw, loss, make_stages

def tell(event):
    if event.iteration == 1:
        pids = [str(child.pid) for child in multiprocessing.active_children()]
        open(sys.argv[1], "w").write(" ".join(pids))

if __name__ == "__main__":
    plan = recycle.solve(recycle.problem(2, 2, 3, costs=(1, 1, 1)), "greedy")
    launch(plan, make_stages(2), Numbers(), loss, adamw, Settings(num_steps=10**6), tell)
"""


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="asks Linux's /proc who is there")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_is_left_behind_however_the_launcher_ends(end, tmp_path):
    script, told = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    told.touch()
    root = Path(__file__).parents[2]
    command, places = [sys.executable, str(script), str(told)], {**os.environ, "PYTHONPATH": str(root)}
    launcher = subprocess.Popen(command, env=places, stderr=subprocess.DEVNULL, start_new_session=True)
    assert ends_with(launcher, told, 4, end)
