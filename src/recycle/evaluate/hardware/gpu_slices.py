"""Slices of one GPU: the CUDA Multi-Process Service (MPS) gives each process a share of the multiprocessors."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recycle.core.errors import UserError

_CONTROL = "nvidia-cuda-mps-control"
_PIPES, _LOGS, _SHARE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_TIMEOUT_S, _QUIT_S, _PREFIX = 30, 10, "recycle-slices-"
# Its stdin is closed by its parent, or when the parent has ended.
# The service waits for its clients, of which the parent may be one: processes of the service that are still there after a while
# are killed. They have its folder in their environment, and their short name is cut after 15 letters.
_STOP = """
import glob, os, shutil, signal, subprocess, sys
sys.stdin.read()
control, timeout_s, folder = sys.argv[1:]
try:
    subprocess.run([control], input=b"quit\\n", timeout=float(timeout_s), capture_output=True)
except subprocess.TimeoutExpired:
    for entry in glob.glob("/proc/[0-9]*"):
        try:
            is_ours = folder.encode() in open(entry + "/environ", "rb").read()
            if is_ours and open(entry + "/comm").read().startswith("nvidia-cuda-mps"):
                os.kill(int(entry.rpartition("/")[2]), signal.SIGKILL)
        except OSError:
            pass
finally:
    shutil.rmtree(folder, ignore_errors=True)
"""


@contextmanager
def slices(num: int) -> Iterator[None]:
    """Give every process that starts inside one of `num` slices of the GPU; the service is stopped afterwards."""
    if shutil.which(_CONTROL) is None:
        raise UserError(f"slices of a GPU need {_CONTROL}, which comes with NVIDIA's driver, and it is not here")
    share = max(1, 100 // num)
    # Not a scratch folder, which other processes may remove once this one has died: the guard still needs it to stop the service.
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    added = {_PIPES: str(folder / "pipe"), _LOGS: str(folder / "log"), _SHARE: str(share)}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        with _guard(folder):
            for name in (_PIPES, _LOGS):
                os.makedirs(added[name])
            _start()
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _guard(folder: Path) -> Iterator[None]:
    """Stop the service and remove its folder afterwards, by a process that outlives this one if it is killed."""
    command = [sys.executable, "-S", "-c", _STOP, _CONTROL, str(_QUIT_S), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as guard:
        try:
            yield
        finally:
            guard.communicate()


def _start() -> None:
    try:
        subprocess.run([_CONTROL, "-d"], check=True, timeout=_TIMEOUT_S, capture_output=True, text=True)
    except subprocess.CalledProcessError as problem:
        raise UserError(f"{_CONTROL} cannot be started: {problem.stderr.strip() or problem}") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{_CONTROL} cannot be started: it did not answer for {_TIMEOUT_S} s") from None
