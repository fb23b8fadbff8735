"""Real processes play a plan: the same weights as in one process, rows in order, and nobody is left behind."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import recycle
from recycle.core.errors import PortInUse, WorkerFailed
from recycle.core.op import Kind
from recycle.runtime.digest import whole_digest
from recycle.runtime.job import Job, Settings
from recycle.runtime.launch import launch
from recycle.runtime.solo import Solo
from recycle.runtime.worker import Applied
from tests.processes import ends_with
from tests.runtime.jobs import (
    Bounded,
    Explodes,
    Fails,
    Numbers,
    adamw,
    careful_stages,
    loss,
    make_stages,
    scaled_loss,
    sgd,
    tied_stages,
)

pytestmark = pytest.mark.timeout(180)
SYNCHRONOUS = "adaptive,decoupled"


def plan(fail, techniques="adaptive,decoupled,staggered", shape=(2, 3, 4)):
    return recycle.solve(recycle.problem(*shape, fail=fail, costs=(10, 13, 9), comm=1, techniques=techniques), "greedy")


def in_one_process(stages, samples, is_exact=True, max_norm=None, steps=3, shape=(2, 3, 4)):
    """The mean loss of every step and the weights, by the synchronous reference with nobody dead."""
    job = Solo(plan("", shape=shape), stages, samples, loss, adamw, seed=5, is_exact=is_exact, max_norm=max_norm)
    return [job.iterate(step) for step in range(steps)], job.weights_sha256()


def in_processes(made, stages, samples, is_exact=True, max_norm=None, steps=3):
    """The same by real workers, and all that they told of their steps."""
    heard = []
    settings = Settings(steps, seed=5, is_exact=is_exact, max_norm=max_norm)
    finished = launch(Job(made, stages, samples, loss, adamw, settings), heard.append)
    assert not multiprocessing.active_children()
    applied = [told for told in heard if isinstance(told, Applied)]
    losses = [{} for _ in range(steps)]
    for told in applied:
        losses[told.iteration] |= told.losses
    means = [sum(found[chain] for chain in sorted(found)) / len(found) for found in losses]
    return means, whole_digest({worker: told.digest for worker, told in finished.items()}), applied


@pytest.mark.parametrize("fail", ["", "W1_1", "W0_0,W1_2"])
@pytest.mark.parametrize("techniques", ["adaptive,decoupled,staggered", SYNCHRONOUS])
def test_processes_compute_what_one_process_computes_bit_for_bit(fail, techniques):
    made = plan(fail, techniques)
    losses, weights, applied = in_processes(made, make_stages(3, 0.1), Numbers(), max_norm=0.05)
    expected, expected_weights = in_one_process(make_stages(3, 0.1), Numbers(), max_norm=0.05)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert weights == expected_weights
    rows = {row.worker: row for row in made.rows}
    assert {(told.worker, told.iteration) for told in applied} == {(worker, step) for worker in rows for step in range(3)}
    for told in applied:
        ops = [span.label for span in told.spans if not span.is_in_vain]
        assert ops == [*(str(slot.op) for slot in made.slots(rows[told.worker])), "reduce", "optimizer"]
        assert all(span.start_us <= span.end_us for span in told.spans)


def norms(applied, steps):
    return [next(told.verdict for told in applied if told.iteration == step) for step in range(steps)]


def test_a_guess_that_was_wrong_is_taken_back_and_the_iteration_begun_again():
    # The norm falls as training goes on: between its largest and its smallest, some steps are clipped and some are not.
    *_, applied = in_processes(plan(""), make_stages(3), Numbers(), steps=6)
    free = [verdict.norm for verdict in norms(applied, 6)]
    limit = (min(free) + max(free)) / 2
    losses, weights, applied = in_processes(plan("W1_1"), make_stages(3), Numbers(), max_norm=limit, steps=6)
    expected, expected_weights = in_one_process(make_stages(3), Numbers(), max_norm=limit, steps=6)
    assert weights == expected_weights
    assert losses == pytest.approx(expected, rel=1e-12)
    verdicts = norms(applied, 6)
    assert {verdict.scale == 1.0 for verdict in verdicts} == {True, False}
    again = {told.iteration for told in applied if any(span.is_in_vain for span in told.spans)}
    # Begun again is what follows a clipped step, unless the one before that was clipped, too: then it was not guessed.
    scaled = [verdict.scale != 1.0 for verdict in verdicts]
    assert again == {step + 1 for step in range(5) if scaled[step] and (step == 0 or not scaled[step - 1])}


@pytest.mark.parametrize("techniques", ["adaptive,decoupled,staggered", SYNCHRONOUS])
@pytest.mark.parametrize("is_exact", [True, False])
def test_a_step_with_infinite_gradients_is_skipped_by_all_as_if_they_had_waited_for_each_other(techniques, is_exact):
    losses, weights, applied = in_processes(plan("W0_2", techniques), make_stages(3), Explodes(1), is_exact, steps=4)
    expected, expected_weights = in_one_process(make_stages(3), Explodes(1), is_exact, steps=4)
    if is_exact:
        assert weights == expected_weights
    assert losses[2:] == pytest.approx(expected[2:], rel=1e-5)
    assert [verdict.scale for verdict in norms(applied, 4)] == [1.0, None, 1.0, 1.0]
    again = {told.iteration for told in applied if any(span.is_in_vain for span in told.spans)}
    assert again == ({2} if techniques != SYNCHRONOUS else set())
    for told in applied:  # what is in vain is a warm-up: forward passes alone
        assert {span.label[1] for span in told.spans if span.is_in_vain} <= {Kind.F.value}


def test_an_op_that_fails_on_weights_that_were_only_guessed_ends_nothing():
    # The first step's gradients are infinite: stepping with them makes weights on which every forward pass raises.
    settings = Settings(3, seed=5, is_exact=False)
    told = []
    job = Job(plan("W1_1"), careful_stages(3), Bounded(), scaled_loss, sgd, settings)
    launch(job, told.append)
    applied = [one for one in told if isinstance(one, Applied)]
    assert [verdict.scale for verdict in norms(applied, 3)] == [None, 1.0, 1.0]
    assert {one.iteration for one in applied if any(span.is_in_vain for span in one.spans)} == {1}


@pytest.mark.parametrize("fail", ["", "W1_0", "W0_2"])
def test_tied_parameters_of_the_first_and_the_last_stage_stay_one(fail):
    losses, weights, _ = in_processes(plan(fail), tied_stages(3), Numbers(), max_norm=0.05)
    expected, expected_weights = in_one_process(tied_stages(3), Numbers(), max_norm=0.05)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert weights == expected_weights


def test_a_worker_that_fails_says_its_last_words_and_all_are_ended():
    with pytest.raises(WorkerFailed, match="the disk is gone"):
        in_processes(plan(""), make_stages(3), Fails())
    assert not multiprocessing.active_children()


def test_a_worker_that_is_killed_is_named_or_its_peers_say_that_it_is_gone():
    def kill_one(told):
        if isinstance(told, Applied) and told.iteration == 1:
            victims = [child for child in multiprocessing.active_children() if child.name == "W0_1"]
            for victim in victims:
                os.kill(victim.pid, signal.SIGKILL)

    job = Job(plan(""), make_stages(3), Numbers(), loss, adamw, Settings(num_steps=2000))
    with pytest.raises(WorkerFailed, match=r"W0_1 ended with exit code -9|cannot go on"):
        launch(job, kill_one)
    assert not multiprocessing.active_children()


def test_what_cannot_be_sent_to_a_process_is_named():
    job = Job(plan(""), make_stages(3), Numbers(), lambda made, targets: made.mean(), adamw, Settings(num_steps=1))
    with pytest.raises(recycle.UserError, match="lambda"):
        launch(job, print)
    assert not multiprocessing.active_children()


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job = Job(plan(""), make_stages(3), Numbers(), loss, adamw, Settings(num_steps=1))
        with pytest.raises(PortInUse, match=f"port {port} "):
            launch(job, print, port=port)


SCRIPT = """
import multiprocessing, sys
import recycle
from recycle.runtime.job import Job, Settings
from recycle.runtime.launch import launch
from recycle.runtime.worker import Applied
from tests.runtime.jobs import Numbers, adamw, loss, make_stages

def tell(told):
    if isinstance(told, Applied) and told.iteration == 1:
        pids = [str(child.pid) for child in multiprocessing.active_children()]
        open(sys.argv[1], "w").write(" ".join(pids))

if __name__ == "__main__":
    plan = recycle.solve(recycle.problem(2, 2, 3, costs=(1, 1, 1)), "greedy")
    launch(Job(plan, make_stages(2), Numbers(), loss, adamw, Settings(num_steps=10**6)), tell)
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
