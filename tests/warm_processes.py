"""Processes that start with everything loaded: torch alone takes two seconds of processor time in every new process.

A `WarmProcess` is forked from the fork server of the test process, and runs `recycle ...` or a script as a new Python would. The
trainings that it starts take their workers from the same server.
"""

import atexit
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

from recycle.cli.main import main
from recycle.host import process_pool
from recycle.runtime.launch.forkserver import fork_context


def warm_context() -> ForkServerContext:
    """The fork server of this test process, with the planner loaded, too; the first call for any server decides that.

    Pools of planning processes take theirs from it as well.
    """
    process_pool.START_METHOD = "forkserver"
    return fork_context(["tests.preload"])


class WarmProcess:
    """A process with the methods of `subprocess.Popen`; `words` are those of `recycle`, or a script and its arguments."""

    def __init__(
        self,
        words: Sequence[object],
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        is_script: bool = False,
    ) -> None:
        context = warm_context()
        self._printed = tempfile.TemporaryDirectory()
        address = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
        arguments = [str(word) for word in words]
        variables = dict(os.environ if environment is None else environment)
        args = (arguments, is_script, str(folder or Path.cwd()), variables, self._printed.name, address)
        self._process = context.Process(target=_run, args=args)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a warm process", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end, and return what was printed to both streams."""
        self.wait(timeout)
        out, err = (Path(self._printed.name, name).read_text(encoding="utf-8") for name in ("1", "2"))
        return out, err

    def kill(self) -> None:
        self._process.kill()


def _run(words: list[str], is_script: bool, folder: str, environment: dict[str, str], printed: str, address: object) -> None:
    """Become a process that was started in `folder` with this environment, its output in the folder `printed`."""
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY | os.O_CREAT), (2, os.O_WRONLY | os.O_CREAT)):
        opened = os.open(os.devnull if number == 0 else os.path.join(printed, str(number)), mode, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # Python 3.11 to 3.13 would start another fork server here, although this one serves any process that knows its address.
    server = forkserver._forkserver  # type: ignore[attr-defined]
    process_pool.START_METHOD = "forkserver"
    server._forkserver_address, server.ensure_running = address, lambda: None
    forkserver.ensure_running = server.ensure_running
    try:
        if is_script:
            script = Path(words[0]).resolve()  # as Python does, so that workers can import it
            sys.argv, sys.path[0] = words, str(script.parent)
            runpy.run_path(str(script), run_name="__main__")
        else:
            sys.argv = ["recycle", *words]
            sys.exit(main(words))
    finally:
        atexit._run_exitfuncs()
