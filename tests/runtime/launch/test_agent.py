"""An agent keeps a worker in every slot; one that dies is started again, one that dies too often is set aside. Real processes."""

import os
import signal
import sys
import threading
import time
from functools import partial

import pytest

from recycle.core.errors import FileProblem, UserError, WorkerFailed
from recycle.runtime.launch import process_launcher, restart_policy
from recycle.runtime.launch.agent import Agent
from recycle.runtime.launch.forkserver import fork_context
from recycle.runtime.launch.start_process import start_process
from recycle.runtime.launch.supervisor import WorkerSlot
from recycle.runtime.worker.worker import MAY_RETRY, REFUSED
from tests.processes import is_there

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(restart_policy, "_FIRST_S", 0.01)


def run(take_part, num_workers=1, restarts=3, grace_s=20.0, logs=None):
    """What the agent said; its error if it raised one."""
    said = []
    made = Agent(
        fork_context([]), [WorkerSlot(number) for number in range(num_workers)], take_part, restarts, grace_s, said.append, logs
    )
    try:
        made.run()
    except WorkerFailed as problem:
        said.append(str(problem))
    return said


# What workers do here; each runs in a process of its own.


def note(folder, text=""):
    """Note this process in a folder, and return how many were noted before."""
    before = len(os.listdir(folder))
    (folder / f"{before}-{os.getpid()}").write_text(text)
    return before


def end_with(folder, codes, say):
    code = codes[min(note(folder), len(codes) - 1)]
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


def speak(say):
    say("it begins")
    print("printed", end="", flush=True)


def be_wrong(say):
    raise UserError("no such model")


def crash(say):
    raise RuntimeError("out of luck")


def stay(folder, say):
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    note(folder)
    while True:
        time.sleep(0.05)


def ignore(folder, say):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(folder)
    time.sleep(60)


def test_a_worker_that_dies_is_started_again_until_it_is_there_to_the_end(tmp_path):
    assert run(partial(end_with, tmp_path, [-signal.SIGKILL, MAY_RETRY, 3, 0])) == [
        "worker 0 was killed by SIGKILL; it is started again in 0.01 s",
        "worker 0 could not join; it is started again in 0.02 s",
        "worker 0 failed with exit code 3; it is started again in 0.04 s",
        "the job is over",
    ]


def test_one_that_dies_too_often_is_set_aside_and_named(tmp_path):
    said = run(partial(end_with, tmp_path, [1]), restarts=2)
    assert said[2:] == [
        "worker 0 failed with exit code 1, too often within an hour: it is set aside, and the job goes on without it",
        "no worker of this machine takes part any more: see above why",
    ]
    assert len(os.listdir(tmp_path)) == 3


def test_one_that_is_refused_is_not_started_again(tmp_path):
    assert run(partial(end_with, tmp_path, [REFUSED])) == [
        "worker 0 was refused, and is not started again",
        "no worker of this machine takes part any more: see above why",
    ]


def test_when_the_job_is_over_for_one_nobody_is_started_any_more(tmp_path, monkeypatch):
    monkeypatch.setattr(restart_policy, "_FIRST_S", 30.0)
    said = run(partial(end_with, tmp_path, [1, 0]), num_workers=2)
    assert said == [f"worker {said[0][7]} failed with exit code 1; it is started again in 30 s", "the job is over"]


def test_what_workers_print_is_shown_and_kept(tmp_path, capsys):
    assert run(speak, num_workers=2, logs=tmp_path / "logs") == ["the job is over"]
    shown = capsys.readouterr().err.splitlines()
    assert sorted(shown) == [f"worker {number} | {line}" for number in range(2) for line in ("it begins", "printed")]
    assert (tmp_path / "logs" / "worker-1.log").read_text() == "it begins\nprinted\n"


def test_the_last_words_of_a_worker_say_why_it_ended(capsys):
    run(be_wrong)
    assert capsys.readouterr().err == "worker 0 | no such model\n"
    run(crash, restarts=0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("worker 0 | Process worker 0:")
    assert lines[-1] == "worker 0 | RuntimeError: out of luck"


def test_a_folder_for_logs_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileProblem, match=r"cannot write .*file/logs: Not a directory"):
        run(speak, logs=tmp_path / "file" / "logs")


def signal_when_noted(folder, num_workers, *numbers):
    """Send these signals to this process when so many workers run."""

    def send():
        while len(os.listdir(folder)) < num_workers:
            time.sleep(0.01)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    threading.Thread(target=send, daemon=True).start()


def none_is_left(folder):
    return not any(is_there(name.partition("-")[2]) for name in os.listdir(folder))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_all_workers_leave(tmp_path, number):
    signal_when_noted(tmp_path, 2, number)
    assert run(partial(stay, tmp_path), num_workers=2) == [
        f"{number.name}: 2 workers leave after the present step, within 20 s; a second signal ends them at once"
    ]
    assert none_is_left(tmp_path)


def test_a_worker_that_starts_while_the_agent_is_asked_to_stop_is_ended(tmp_path, monkeypatch):
    def start_and_signal(process):
        start_process(process)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(process_launcher, "start_process", start_and_signal)
    said = run(partial(ignore, tmp_path), num_workers=2)
    assert said == ["SIGTERM: 0 workers leave after the present step, within 20 s; a second signal ends them at once"]
    assert none_is_left(tmp_path)


def test_who_does_not_leave_in_time_is_ended(tmp_path):
    signal_when_noted(tmp_path, 1, signal.SIGTERM)
    assert set(run(partial(ignore, tmp_path), grace_s=0.2)[1:]) == {"worker 0 has not left within 0.2 s, and is ended"}
    assert none_is_left(tmp_path)


def test_a_second_signal_ends_them_at_once(tmp_path):
    signal_when_noted(tmp_path, 1, signal.SIGTERM, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(partial(ignore, tmp_path))
    assert none_is_left(tmp_path)
