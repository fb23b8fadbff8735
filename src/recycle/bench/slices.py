"""Slices of one GPU: the CUDA Multi-Process Service gives each process a share of the multiprocessors. No setting is changed."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from recycle.core.errors import UserError
from recycle.core.scratch import scratch

_CONTROL = "nvidia-cuda-mps-control"
_PIPES, _LOGS, _SHARE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_PATIENCE_S = 30
# What it reads ends when it is told, or when whoever started it is gone.
_STOP = """
import subprocess, sys
sys.stdin.read()
control, patience_s = sys.argv[1:]
subprocess.run([control], input=b"quit\\n", timeout=float(patience_s), capture_output=True)
"""


@contextmanager
def slices(num: int) -> Iterator[None]:
    """Let processes that start inside each have one of `num` slices of the GPU; the service is stopped afterwards."""
    if shutil.which(_CONTROL) is None:
        raise UserError(f"slices of a GPU need {_CONTROL}, which comes with NVIDIA's driver, and it is not here")
    share = max(1, 100 // num)
    with scratch() as folder:
        added = {_PIPES: str(folder / "pipe"), _LOGS: str(folder / "log"), _SHARE: str(share)}
        for name in (_PIPES, _LOGS):
            os.makedirs(added[name])
        before = {name: os.environ.get(name) for name in added}
        os.environ.update(added)
        try:
            _start()
            with _guard():
                yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@contextmanager
def _guard() -> Iterator[None]:
    """Have the service stopped afterwards, by somebody who outlives this process if it is killed."""
    command = [sys.executable, "-S", "-c", _STOP, _CONTROL, str(_PATIENCE_S)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as guard:
        try:
            yield
        finally:
            guard.communicate()


def _start() -> None:
    try:
        subprocess.run([_CONTROL, "-d"], check=True, timeout=_PATIENCE_S, capture_output=True, text=True)
    except subprocess.CalledProcessError as problem:
        raise UserError(f"{_CONTROL} cannot be started: {problem.stderr.strip() or problem}") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{_CONTROL} cannot be started: it said nothing for {_PATIENCE_S} s") from None
