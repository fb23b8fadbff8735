"""`python -m recycle.evaluate.hardware`: errors are one sentence and an exit code, as with every command."""

import json
import os
import signal
import sys
import time

import pytest

from recycle.evaluate.hardware.__main__ import run_hardware_part
from tests.processes import wait_for
from tests.warm_processes import WarmProcess


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command with these arguments; return its exit code and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["recycle.evaluate.hardware", *map(str, arguments)])
        return run_hardware_part(), capsys.readouterr().err

    return run


def test_a_folder_without_a_setup_is_refused_in_one_sentence(run, tmp_path):
    sentence = f"python -m recycle.evaluate.hardware: cannot read {tmp_path / 'setup.json'}: No such file or directory\n"
    assert run("race", tmp_path) == (2, sentence)


def test_an_impossible_number_of_workers_is_refused_and_nothing_is_made(run, tmp_path):
    code, err = run("race", tmp_path / "new", "--backend", "cpu-cores", "--workers", 9)
    assert (code, err.count("\n")) == (2, 1)
    assert "9 workers are no pipelines of 4 stages" in err
    assert not (tmp_path / "new").exists()


def test_a_new_folder_gets_its_setup_before_plans_are_required(run, tmp_path):
    code, err = run("race", tmp_path, "--backend", "cpu-cores", "--workers", 8)
    assert (code, err.count("\n")) == (2, 1)
    assert "there is no plan" in err
    assert json.loads((tmp_path / "setup.json").read_text())["pipelines"] == 2


@pytest.mark.parametrize(("part", "name"), [("race", "rounds"), ("race", "iterations"), ("deaths", "kills")])
@pytest.mark.parametrize("value", [0, -3])
def test_less_than_one_of_anything_is_refused(run, tmp_path, part, name, value):
    assert run(part, tmp_path, f"--{name}", value) == (
        2,
        f"python -m recycle.evaluate.hardware: --{name} is {value}, but it must be at least 1\n",
    )


def is_there(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


PROFILE = """
import sys
from recycle.evaluate.hardware.__main__ import run_hardware_part
if __name__ == "__main__":
    sys.exit(run_hardware_part())
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("after_s", [0.5, 2])  # while workers are started, and while they rehearse
def test_an_interrupt_says_how_to_resume_and_leaves_no_process(tmp_path, after_s):
    script = tmp_path / "script.py"
    script.write_text(PROFILE)
    words = [script, "profile", tmp_path, "--backend", "cpu-cores", "--small", "--workers", "8"]
    started = WarmProcess(words, is_script=True)
    try:
        while not (tmp_path / "setup.json").exists():
            assert started.poll() is None
            time.sleep(0.1)
        time.sleep(after_s)
        os.killpg(started.pid, signal.SIGINT)  # as a terminal does: to all of them
        err = started.communicate(timeout=60)[1]
        assert err == "\npython -m recycle.evaluate.hardware: interrupted; the same command begins again\n"
        assert started.returncode == 128 + signal.SIGINT
        wait_for(lambda: not is_there(started.pid), 10)
    finally:
        if is_there(started.pid):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
