"""`recycle coordinator` and `recycle worker`, as on several machines: real processes that only know an address and a token."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from recycle.cli.main import main

pytestmark = pytest.mark.timeout(240)
JOB = (
    *("--pipelines", "2", "--stages", "2", "--microbatches", "2", "--steps", "40", "--exact"),
    *("--layers", "2", "--width", "16", "--heads", "2", "--context", "16", "--samples", "1"),
)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def started():
    """A function that starts commands; whatever still runs in the end is ended."""
    processes = []

    def start(*words, **streams):
        command = [sys.executable, "-m", "recycle", *map(str, words)]
        made = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **streams)
        processes.append(made)
        return made

    try:
        yield start
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def wait_for(what, seconds=90):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


def num_steps(out):
    with contextlib.suppress(FileNotFoundError):
        return (out / "record.jsonl").read_text(encoding="utf-8").count('"event":"step"')
    return 0


def test_a_worker_and_the_coordinator_are_killed_and_come_back_and_the_weights_are_those_of_one_machine(tmp_path, capsys):
    out, token, address = tmp_path / "run", tmp_path / "token", f"127.0.0.1:{free_port()}"
    coordinator = ("coordinator", *JOB, "--listen", address, "--token-file", token, "--out", out, "--json")
    worker = ("worker", address, "--token-file", token)
    with started() as start:
        first = start(*coordinator)
        wait_for(token.exists)
        assert token.stat().st_mode & 0o077 == 0
        workers = [start(*worker) for _ in range(4)]
        wait_for(lambda: num_steps(out) >= 3)
        os.kill(workers[0].pid, signal.SIGKILL)
        workers[0] = start(*worker)
        wait_for(lambda: num_steps(out) >= 6)
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        again = start(*coordinator)
        said, problems = again.communicate(timeout=150)
        assert again.returncode == 0, problems
        told = json.loads(said)
        for process in workers[1:]:
            assert process.wait(20) == 0
    assert len(told["losses"]) == 40
    assert told["recoveries"][0]["cause"] == "its connection closed"
    assert main(["train", *JOB, "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert told["weights_sha256"] == alone["weights_sha256"]
    assert told["losses"] == alone["losses"]


def test_who_has_another_token_or_finds_nobody_is_told_so(tmp_path):
    address, right, wrong = f"127.0.0.1:{free_port()}", tmp_path / "right", tmp_path / "wrong"
    wrong.write_text("something else\n")
    wrong.chmod(0o600)
    with started() as start:
        start("coordinator", *JOB, "--listen", address, "--token-file", right, "--out", tmp_path / "run")
        wait_for(right.exists)
        stranger = start("worker", address, "--token-file", wrong)
        _, problems = stranger.communicate(timeout=90)
    assert stranger.returncode == 1
    assert "this is not the job's token" in problems


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["worker", "here", "--token-file", "token"], "'here' is no address: write HOST:PORT"),
        (["worker", "127.0.0.1:1", "--token-file", "absent"], "cannot read the token in absent"),
        (["worker", "127.0.0.1:1", "--token-file", "open"], "can be read by others on this machine: chmod 600 open"),
        (["worker", "127.0.0.1:1", "--token-file", "empty"], "empty holds no token"),
        (["worker", "127.0.0.1:1", "--token-file", "token", "--seat", "first"], "'first' is not a worker"),
        (["coordinator", *JOB, "--listen", "127.0.0.1:x", "--token-file", "token", "--out", "run"], "is no address"),
    ],
)
def test_wrong_words_get_one_sentence(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text, mode in (("token", "secret\n", 0o600), ("open", "secret\n", 0o644), ("empty", "\n", 0o600)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    assert main(words) == 2
    told = capsys.readouterr().err
    assert says in told
    assert len(told.splitlines()) == 1
