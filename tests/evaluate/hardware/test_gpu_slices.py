"""The MPS service of GPU slices, replaced by a script: it is started, always stopped, and leaves no trace."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recycle.core.errors import UserError
from recycle.evaluate.hardware import gpu_slices
from recycle.evaluate.hardware.gpu_slices import slices
from recycle.host.scratch import sweep
from tests.processes import is_there, wait_for

pytestmark = pytest.mark.timeout(60)
NAME = "nvidia-cuda-mps-control"
PIPES, LOGS, SHARE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
# It writes down its arguments, its command on stdin, and whether its folders exist.
NOTES = """#!/bin/sh
[ -d "$CUDA_MPS_PIPE_DIRECTORY" ] && [ -d "$CUDA_MPS_LOG_DIRECTORY" ] && there=yes || there=no
if [ "$1" = -d ]; then command=""; else read -r command; fi
echo "args:$* command:$command folders:$there" >> "{notes}"
"""
# Its daemon stays, with the name of the service, and does not quit.
STAYS = """#!/bin/sh
if [ "$1" = -d ]; then
    cp "$(command -v sleep)" "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-server"
    "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-server" 60 > /dev/null 2>&1 &
    echo $! >> "{notes}"
else
    exec sleep 60
fi
"""
REFUSES = """#!/bin/sh
echo "An instance of this daemon is already running" >&2
exit 1
"""
STARTED, QUIT = "args:-d command: folders:yes", "args: command:quit folders:yes"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Replace the control program of the service by a script; return the file of its notes."""

    def install(text):
        script, notes = tmp_path / "bin" / NAME, tmp_path / "notes"
        script.parent.mkdir()
        script.write_text(text.format(notes=notes))
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
        return notes

    return install


def lines(notes):
    return notes.read_text().splitlines()


def test_the_service_runs_for_as_long_as_the_slices_are_used(install):
    notes = install(NOTES)
    with slices(12):
        assert lines(notes) == [STARTED]
    assert lines(notes) == [STARTED, QUIT]


@pytest.mark.parametrize(("num", "share"), [(12, 8), (8, 12), (1, 100), (200, 1)])
def test_processes_that_start_inside_get_their_share_in_whole_percent(install, num, share):
    install(NOTES)
    with slices(num):
        printed = subprocess.run(["sh", "-c", f"echo ${SHARE}"], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(share)


@pytest.mark.parametrize("problem", [RuntimeError("a worker died"), KeyboardInterrupt()])
def test_the_service_is_stopped_when_the_code_inside_fails(install, problem):
    notes = install(NOTES)
    with pytest.raises(type(problem)) as raised, slices(4):
        raise problem
    assert raised.value is problem
    assert lines(notes) == [STARTED, QUIT]


def test_a_command_that_fails_inside_is_not_taken_for_the_services_command(install):
    notes = install(NOTES)
    with pytest.raises(subprocess.CalledProcessError), slices(4):
        subprocess.run(["false"], check=True)
    assert lines(notes) == [STARTED, QUIT]


def test_the_service_is_stopped_when_the_process_that_uses_it_is_killed(install):
    notes = install(NOTES)
    code = (
        "import os, time\nfrom recycle.evaluate.hardware.gpu_slices import slices\n"
        f"with slices(4): print(os.environ['{PIPES}'], flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout is not None
        folder = Path(user.stdout.readline().strip()).parent
        assert folder.is_dir()
        user.kill()
        sweep()  # as every process does that makes a scratch folder
    for _ in range(400):
        if lines(notes) == [STARTED, QUIT] and not folder.exists():
            return
        time.sleep(0.05)
    pytest.fail(f"only {lines(notes)}, and its folder is {'there' if folder.exists() else 'gone'}")


@pytest.mark.parametrize("before", [{}, {PIPES: "/of/the/user", SHARE: "50"}])
@pytest.mark.parametrize("script", [NOTES, REFUSES])
def test_the_environment_is_as_before_afterwards(install, monkeypatch, before, script):
    install(script)
    for name in (PIPES, LOGS, SHARE):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    known = dict(os.environ)
    try:
        with slices(4):
            assert os.environ[PIPES] != known.get(PIPES)
    except UserError:
        assert script == REFUSES
    assert dict(os.environ) == known


def test_the_folders_of_the_service_are_gone_afterwards(install):
    install(NOTES)
    with slices(4):
        folders = [Path(os.environ[PIPES]), Path(os.environ[LOGS])]
        assert all(folder.is_dir() for folder in folders)
    assert not any(folder.exists() for folder in folders)


def test_a_service_that_does_not_quit_is_killed_and_nothing_else(install, monkeypatch, capfd):
    monkeypatch.setattr(gpu_slices, "_QUIT_S", 0.5)
    notes = install(STAYS)
    with contextlib.ExitStack() as stack:
        with slices(2):
            (pid,) = map(int, lines(notes))
            other = stack.enter_context(subprocess.Popen(["sleep", "60"]))  # the same folder in its environment, another name
            stack.callback(other.kill)
            assert is_there(pid)
        assert other.poll() is None
    wait_for(lambda: not is_there(pid), 10)
    assert "Traceback" not in capfd.readouterr().err


def test_a_machine_without_the_service_is_refused_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=f"^slices of a GPU need {NAME}, which comes with NVIDIA's driver, and it is not here$"):
        slices(4).__enter__()


def test_a_service_that_does_not_start_is_reported_with_its_own_message(install):
    install(REFUSES)
    with pytest.raises(UserError, match=f"^{NAME} cannot be started: An instance of this daemon is already running$"):
        slices(4).__enter__()
