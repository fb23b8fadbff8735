"""Processes of a run stand still and go on, or hang: nobody healthy is lost, nothing waits for ever, no weight changes."""

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

import recycle
from recycle.core.errors import PlannerFailed
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.core.events.record import Saved, Stepped, Suspected, Warned
from recycle.runtime.options import FailureOptions, TrainOptions
from tests.processes import depends_on_load
from tests.runtime.jobs import Numbers, adamw, greedy_plan, loss, make_stages
from tests.runtime.recovery_runs import Run, undisturbed

pytestmark = pytest.mark.timeout(240)
on_linux = pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="asks Linux's /proc who is there")


def coordinator_pid():
    return next(child.pid for child in multiprocessing.active_children() if child.name == "coordinator")


def stop_for(pid, seconds):
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)).start()


@on_linux
@pytest.mark.parametrize(("seconds", "steps"), [(1.9, 25), pytest.param(6.0, 60, marks=pytest.mark.slow)])
def test_a_coordinator_that_stands_still_loses_nobody(seconds, steps):
    shape = (3, 2, 2)
    stopped = []  # the workers go on meanwhile: the steps take longer than that

    def watch(event):
        if isinstance(event, Stepped) and event.iteration == 5 and not stopped:
            stopped.append(coordinator_pid())
            stop_for(stopped[0], seconds)

    run = Run(shape, steps=steps, lease_s=1.0, pause_s=0.06, watch=watch)
    assert stopped
    assert run.of(Suspected) == []
    assert run.recoveries == []
    assert run.trained.weights_sha256 == undisturbed(shape, steps)[0]
    assert any("the coordinator stood still for" in event.text for event in run.of(Warned))


@on_linux
def test_a_launcher_that_stands_still_loses_nobody():
    shape, steps = (2, 2, 2), 25
    paused = []

    def watch(event):  # the launcher's own thread: its pipe fills meanwhile
        if isinstance(event, Stepped) and event.iteration == 5 and not paused:
            paused.append(True)
            time.sleep(4.0)

    run = Run(shape, steps=steps, lease_s=0.5, pause_s=0.06, watch=watch)
    assert run.of(Suspected) == []
    assert run.trained.weights_sha256 == undisturbed(shape, steps)[0]


@on_linux
def test_a_run_of_which_every_process_stands_still_goes_on_as_if_nothing_had_been():
    """Ctrl-Z and fg: all at once, and they go on one after the other."""
    shape, steps = (2, 2, 2), 25
    stopped = []

    def watch(event):
        if isinstance(event, Stepped) and event.iteration == 5 and not stopped:
            stopped.extend(child.pid for child in multiprocessing.active_children())
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(4.0)
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.05)

    run = Run(shape, steps=steps, lease_s=1.0, pause_s=0.06, watch=watch)
    assert len(stopped) == 5
    assert run.of(Suspected) == []
    assert run.trained.weights_sha256 == undisturbed(shape, steps)[0]


@pytest.mark.parametrize("place", ["reduce", "step"])
def test_a_worker_that_hangs_outside_an_op_is_given_up_with_a_reason(place):
    shape = (2, 2, 2)
    begin_s = time.monotonic()
    run = Run(shape, f"slow W1_1@5:{place}+3600s", lease_s=0.5)
    with depends_on_load():
        assert time.monotonic() - begin_s < 60
    (suspected,) = run.of(Suspected)
    label = {"reduce": "reduce", "step": "optimizer"}[place]
    assert suspected.node == "W1_1"
    assert suspected.reason.startswith("far behind its plan: it has been busy for")
    assert f"with {label}" in suspected.reason
    assert run.trained.weights_sha256 == undisturbed(shape)[0]


class Mistaken:
    def __init__(self, plan):
        self.plan = plan

    def answer(self, failed):
        raise ZeroDivisionError("of its own")


def test_a_planner_that_fails_ends_the_run_with_its_error():
    plan = greedy_plan((2, 2, 2))
    script = Script((Injection.parse(Action.KILL, "W1_1@3"),))
    options = TrainOptions(failures=FailureOptions(Mistaken(plan), script))
    with pytest.raises(PlannerFailed, match="the planner failed: ZeroDivisionError: of its own"):
        recycle.train(plan, make_stages(2), Numbers(), loss, adamw, steps=20, samples=1, out=None, options=options)


# Checkpoints.


@pytest.mark.slow
def test_a_rollback_does_not_load_a_checkpoint_with_flipped_bytes(tmp_path):
    shape, steps = (2, 2, 3), 24
    flipped = []

    def watch(event):
        if isinstance(event, Saved) and event.num_steps == 12 and not flipped:
            path = tmp_path / "checkpoints" / event.folder / "stage-1.safetensors"
            data = bytearray(path.read_bytes())
            data[-40:-36] = bytes(byte ^ 255 for byte in data[-40:-36])
            path.write_bytes(data)
            flipped.append(event.folder)

    run = Run(shape, "kill W0_1@17", "kill W1_1@17", steps=steps, out=tmp_path, every=6, pause_s=0.03, watch=watch)
    assert flipped[0] == "step-00000012"
    assert run.trained.weights_sha256 == undisturbed(shape, steps)[0]
    assert min(recovery.iteration for recovery in run.recoveries) == 6
    texts = [event.text for event in run.of(Warned)]
    assert any("does not have the bytes that were written" in text for text in texts)
    assert any("step-00000006 before it is used" in text for text in texts)
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == steps
