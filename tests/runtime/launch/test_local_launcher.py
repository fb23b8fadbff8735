"""Real processes play a plan: the same weights as in one process, rows in order, and nobody is left behind."""

import math
import multiprocessing
import os
import signal
import socket
from functools import cache
from pathlib import Path
from threading import Lock
from types import SimpleNamespace

import pytest

import recycle
from recycle.core.cluster import Shape, Worker
from recycle.core.errors import PortInUse, WorkerFailed
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.core.events.record import OpRan, Stepped
from recycle.core.events.trace import Trace
from recycle.core.op import Kind
from recycle.runtime.job import Job
from recycle.runtime.launch import local_launcher
from recycle.runtime.launch.local_launcher import launch
from recycle.runtime.launch.start_process import start_process
from recycle.runtime.options import FailureOptions, TrainOptions
from tests.processes import ends_with
from tests.runtime.jobs import (
    Bounded,
    Explodes,
    Fails,
    Numbers,
    adamw,
    careful_stages,
    greedy_plan,
    loss,
    make_stages,
    scaled_loss,
    sgd,
    small_stages,
    tied_stages,
)
from tests.runtime.reference_executor import ReferenceExecutor
from tests.warm_processes import WarmProcess

pytestmark = pytest.mark.timeout(180)
SYNCHRONOUS = "adaptive,decoupled"


def plan(fail, techniques="adaptive,decoupled,staggered", shape=(2, 3, 4)):
    return greedy_plan(shape, fail, techniques, comm=1)


@cache
def in_one_process(stages, samples, is_exact=True, max_norm=None, steps=3, shape=(2, 3, 4)):
    """The mean loss of every step and the weights, by the synchronous reference with nobody dead; each is computed once.

    `stages` and `samples` are functions that make them, with their arguments.
    """
    made = stages[0](*stages[1:]), samples[0](*samples[1:])
    job = ReferenceExecutor(plan("", shape=shape), *made, loss, adamw, seed=5, is_exact=is_exact, max_norm=max_norm)
    return [job.iterate(step) for step in range(steps)], job.weights_sha256()


def test_processes_of_torchrun_do_not_train_a_job_each(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(recycle.UserError, match="torchrun has started 4 processes, and each would train"):
        launch(Job(plan(""), small_stages(3), Numbers(), loss, sgd, 1))


def launched(job, watch=lambda event: None):
    """Train by real workers, none of which is left."""
    try:
        return launch(job, watch)
    finally:
        assert not multiprocessing.active_children()


def in_processes(made, stages, samples, is_exact=True, max_norm=None, steps=3):
    """The same by real workers, and all events of the run."""
    events = []
    options = TrainOptions(5, is_exact, max_norm)
    trained = launched(Job(made, stages, samples, loss, adamw, steps, options=options), events.append)
    assert [step.loss for step in steps_of(events)] == [value if math.isfinite(value) else None for value in trained.losses]
    return trained, events


def steps_of(events):
    steps = [event for event in events if isinstance(event, Stepped)]
    assert [step.iteration for step in steps] == list(range(len(steps)))
    return steps


def begun_again(events):
    """The iterations of which something ran in vain."""
    return {event.iteration for event in events if isinstance(event, OpRan) and event.is_in_vain}


@pytest.mark.parametrize("fail", ["", pytest.param("W1_1", marks=pytest.mark.slow), "W0_0,W1_2"])
@pytest.mark.parametrize("techniques", ["adaptive,decoupled,staggered", SYNCHRONOUS])
def test_processes_compute_what_one_process_computes_bit_for_bit(fail, techniques):
    made = plan(fail, techniques)
    trained, events = in_processes(made, make_stages(3, 0.1), Numbers(), max_norm=0.05)
    expected, expected_weights = in_one_process((make_stages, 3, 0.1), (Numbers,), max_norm=0.05)
    assert trained.losses == pytest.approx(expected, rel=1e-12)
    assert trained.weights_sha256 == expected_weights
    ran = {}
    for event in events:
        if isinstance(event, OpRan):
            assert event.start_us <= event.end_us
            ran.setdefault((event.worker, event.iteration), []).append(event)
    rows = {str(row.worker): row for row in made.rows}
    assert set(ran) == {(worker, step) for worker in rows for step in range(3)}
    for (worker, _), own in ran.items():
        ops = [event.op for event in own if not event.is_in_vain]
        assert ops == [*(str(slot.op) for slot in made.slots(rows[worker])), "reduce", "optimizer"]


def test_a_guess_that_was_wrong_is_taken_back_and_the_iteration_begun_again():
    # The norm falls as training goes on: between its largest and its smallest, some steps are clipped and some are not.
    _, events = in_processes(plan(""), small_stages(3), Numbers(), steps=6)
    free = [step.norm for step in steps_of(events)]
    limit = (min(free) + max(free)) / 2
    trained, events = in_processes(plan("W1_1"), small_stages(3), Numbers(), max_norm=limit, steps=6)
    expected, expected_weights = in_one_process((small_stages, 3), (Numbers,), max_norm=limit, steps=6)
    assert trained.weights_sha256 == expected_weights
    assert trained.losses == pytest.approx(expected, rel=1e-12)
    scaled = [step.scale != 1.0 for step in steps_of(events)]
    assert set(scaled) == {True, False}
    # Begun again is what follows a clipped step, unless the one before that was clipped, too: then it was not guessed.
    again = {step + 1 for step in range(5) if scaled[step] and (step == 0 or not scaled[step - 1])}
    assert begun_again(events) == again
    assert trained.num_begun_again == len(again)


@pytest.mark.parametrize("techniques", ["adaptive,decoupled,staggered", SYNCHRONOUS])
@pytest.mark.parametrize("is_exact", [True, False])
def test_a_step_with_infinite_gradients_is_skipped_by_all_as_if_they_had_waited_for_each_other(techniques, is_exact):
    trained, events = in_processes(plan("W0_2", techniques), small_stages(3), Explodes(1), is_exact, steps=4)
    expected, expected_weights = in_one_process((small_stages, 3), (Explodes, 1), is_exact, steps=4)
    if is_exact:
        assert trained.weights_sha256 == expected_weights
    assert trained.losses[2:] == pytest.approx(expected[2:], rel=1e-5)
    assert [step.scale for step in steps_of(events)] == [1.0, None, 1.0, 1.0]
    assert begun_again(events) == ({2} if techniques != SYNCHRONOUS else set())
    # What is in vain is a warm-up: forward passes alone.
    assert {event.op[1] for event in events if isinstance(event, OpRan) and event.is_in_vain} <= {Kind.F.value}


def test_an_op_that_fails_on_weights_that_were_only_guessed_ends_nothing():
    # The first step's gradients are infinite: stepping with them makes weights on which every forward pass raises.
    events = []
    launched(Job(plan("W1_1"), careful_stages(3), Bounded(), scaled_loss, sgd, 3, options=TrainOptions(5)), events.append)
    assert [step.scale for step in steps_of(events)] == [None, 1.0, 1.0]
    assert begun_again(events) == {1}


@pytest.mark.parametrize("fail", [pytest.param("", marks=pytest.mark.slow), "W1_0", pytest.param("W0_2", marks=pytest.mark.slow)])
def test_tied_parameters_of_the_first_and_the_last_stage_stay_one(fail):
    trained, _ = in_processes(plan(fail), tied_stages(3), Numbers(), max_norm=0.05)
    expected, expected_weights = in_one_process((tied_stages, 3), (Numbers,), max_norm=0.05)
    assert trained.losses == pytest.approx(expected, rel=1e-12)
    assert trained.weights_sha256 == expected_weights


def test_a_worker_that_fails_says_its_last_words_and_all_are_ended():
    with pytest.raises(WorkerFailed, match="the disk is gone"):
        in_processes(plan(""), make_stages(3), Fails())


def test_a_worker_that_is_killed_is_named_if_there_is_no_plan_source():
    def kill_one(event):
        if isinstance(event, Stepped) and event.iteration == 1:
            victims = [child for child in multiprocessing.active_children() if child.name == "W0_1"]
            for victim in victims:
                os.kill(victim.pid, signal.SIGKILL)

    job = Job(plan(""), make_stages(3), Numbers(), loss, adamw, 2000)
    with pytest.raises(WorkerFailed, match="W0_1 ended with exit code -9"):
        launched(job, kill_one)


def test_what_cannot_be_sent_to_a_process_is_named():
    lock = Lock()
    job = Job(plan(""), make_stages(3), Numbers(), lambda made, targets: made.mean() if lock else targets, adamw, 1)
    with pytest.raises(recycle.UserError, match="lock"):
        launched(job)


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job = Job(plan(""), make_stages(3), Numbers(), loss, adamw, 1, options=TrainOptions(port=port))
        with pytest.raises(PortInUse, match=f"port {port} "):
            launched(job)


SCRIPT = """
import multiprocessing, sys
import recycle
from recycle.core.events.record import Stepped
from recycle.runtime.job import Job
from tests.runtime.jobs import Numbers, adamw, loss, make_stages
from tests.runtime.launch.test_local_launcher import launched

def write_pids(event):
    if isinstance(event, Stepped) and event.iteration == 1:
        pids = [str(child.pid) for child in multiprocessing.active_children()]
        open(sys.argv[1], "w").write(" ".join(pids))

if __name__ == "__main__":
    plan = recycle.solve(recycle.problem(2, 2, 3, costs=(1, 1, 1)), "greedy")
    launched(Job(plan, make_stages(2), Numbers(), loss, adamw, 10**6), write_pids)
"""


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="asks Linux's /proc who is there")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_behind_however_the_launcher_ends(end, tmp_path):
    script, pids = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    pids.touch()
    assert ends_with(WarmProcess([script, pids], is_script=True), pids, 4 + 1, end)  # the workers and the coordinator


class Restartable:
    """A process whose fork server ends in the middle of its first starts."""

    def __init__(self, num_ends):
        self.num_ends, self.num_starts = num_ends, 0

    def start(self):
        self.num_starts += 1
        if self.num_starts <= self.num_ends:
            raise EOFError("unexpected EOF")


@pytest.mark.parametrize("num_ends", [0, 1])
def test_a_process_is_started_although_the_fork_server_ends_meanwhile(num_ends):
    process = Restartable(num_ends)
    start_process(process)
    assert process.num_starts == num_ends + 1


def test_a_process_that_no_fork_server_starts_is_an_error_of_the_machine():
    with pytest.raises(OSError, match="the server that starts processes ended"):
        start_process(Restartable(2))


W0_0, W0_1, W1_0, W1_1 = Shape(2, 2, 1).workers()
SCRIPTED = [Injection.parse(Action.KILL, "W0_0@2"), Injection.parse(Action.HANG, "W0_1@2")]
TRACED = "".join(f"0,add,{worker}\n" for worker in (W0_0, W0_1, W1_0, W1_1)) + "500,remove,W0_0\n"


@pytest.mark.parametrize(
    ("failures", "started"),
    [
        (FailureOptions(), [W0_0, W0_1, W1_0]),
        (FailureOptions(script=Script.of(SCRIPTED, Shape(2, 2, 1), 9)), [W1_0]),
        (FailureOptions(trace=Trace.parse(TRACED)), []),
    ],
    ids=["none", "script", "trace"],
)
def test_deaths_that_were_injected_are_final_and_other_dead_workers_are_started_again(failures, started, monkeypatch):
    launcher = local_launcher._Launcher(None, None, None, None, None, failures, None)
    launcher._workers = [
        SimpleNamespace(name=str(worker), exitcode=exit_code, close=lambda: None)
        for worker, exit_code in ((W0_0, -signal.SIGKILL), (W0_1, -signal.SIGKILL), (W1_0, 1), (W1_1, None))
    ]
    again: list[Worker] = []
    monkeypatch.setattr(launcher, "_start_worker", lambda place, since: again.append(place))
    launcher._restart_dead()
    assert again == []  # not at once
    monkeypatch.setattr(local_launcher, "now_us", lambda: 10**18)
    launcher._restart_dead()
    assert again == started
    assert [worker.name for worker in launcher._workers] == ["W1_1"]


@pytest.mark.parametrize(("code", "expected"), [(-9, "W0_0 ended with exit code -9"), (255, "the fork server, which starts")])
def test_a_worker_that_ends_before_the_first_step_is_described_by_what_is_known_of_it(code, expected):
    launcher = SimpleNamespace(_workers=[SimpleNamespace(pid=5, name="W0_0", exitcode=code, join=lambda seconds: None)])
    assert local_launcher._Launcher._describe_exit(launcher, 5).startswith(expected)
    assert local_launcher._Launcher._describe_exit(launcher, 6) == ""
