"""Processes that start with everything loaded: torch alone takes two seconds of processor time in every new process.

A `WarmProcess` is forked from the fork server of the test process, and runs `recycle ...` or a script as a new Python would. The
fork server of the trainings that it starts is forked from it in turn, so that sessions and limits hold for all of them.
"""

import atexit
import faulthandler
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import util
from multiprocessing.context import ForkServerContext
from pathlib import Path

from recycle.cli.main import main
from recycle.host import process_pool
from recycle.runtime.launch.forkserver import fork_context

_STACKS, _STACKS_S = "stacks", 1.0


class StillRunning(subprocess.TimeoutExpired):
    """A process did not end in time; the message says where its threads are."""

    def __init__(self, seconds: float, stacks: str) -> None:
        super().__init__("a warm process", seconds)
        self.stacks = stacks

    def __str__(self) -> str:
        return f"{super().__str__()}; its threads:\n{self.stacks}"


def warm_context() -> ForkServerContext:
    """The fork server of this test process, with the planner loaded, too; the first call for any server decides that.

    Pools of planning processes take theirs from it as well.
    """
    process_pool.START_METHOD = "forkserver"
    return fork_context(["tests.preload"])


class WarmProcess:
    """A process with the methods of `subprocess.Popen`; `words` are those of `recycle`, or a script and its arguments.

    It leads a session of its own, as under a terminal. It calls `prepare` first.
    """

    def __init__(
        self,
        words: Sequence[object],
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        is_script: bool = False,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        context = warm_context()
        self._printed = tempfile.TemporaryDirectory()
        arguments = [str(word) for word in words]
        variables = dict(os.environ if environment is None else environment)
        args = (arguments, is_script, str(folder or Path.cwd()), variables, self._printed.name, prepare)
        for name in ("1", "2"):
            Path(self._printed.name, name).touch()
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
            raise StillRunning(timeout or 0, self._stacks())
        assert self.returncode is not None
        return self.returncode

    def _stacks(self) -> str:
        written = Path(self._printed.name, _STACKS)
        if not written.exists():
            return "unknown: it has not come so far as to tell"
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR2)
            time.sleep(_STACKS_S)
        return written.read_text(encoding="utf-8") or "unknown: it does not answer"

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end, and return what was printed to both streams."""
        self.wait(timeout)
        return self.printed()

    def printed(self) -> tuple[str, str]:
        """What was printed to both streams so far."""
        out, err = (Path(self._printed.name, name).read_text(encoding="utf-8") for name in ("1", "2"))
        return out, err

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run(
    words: list[str],
    is_script: bool,
    folder: str,
    environment: dict[str, str],
    printed: str,
    prepare: Callable[[], None] | None,
) -> None:
    """Become a process that was started in `folder` with this environment, its output in the folder `printed`."""
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY | os.O_CREAT), (2, os.O_WRONLY | os.O_CREAT)):
        opened = os.open(os.devnull if number == 0 else os.path.join(printed, str(number)), mode, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1)
    stacks = open(os.path.join(printed, "unnamed"), "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    faulthandler.register(signal.SIGUSR2, stacks)
    os.rename(stacks.name, os.path.join(printed, _STACKS))  # from now on the signal does not end this process
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which the fork server ignores
    os.setsid()
    util.spawnv_passfds = _fork_server  # type: ignore[assignment]
    process_pool.START_METHOD = "forkserver"
    try:
        if prepare is not None:
            prepare()
        warm_context()  # now: a process that has computed has had threads, which a fork would lose
        if is_script:
            script = Path(words[0]).resolve()  # as Python does, so that workers can import it
            sys.argv, sys.path[0] = words, str(script.parent)
            runpy.run_path(str(script), run_name="__main__")
        else:
            sys.argv = ["recycle", *words]
            sys.exit(main(words))
    finally:
        atexit._run_exitfuncs()


_spawn = util.spawnv_passfds


def _fork_server(path: str, words: Sequence[str], passed: Sequence[int]) -> int:
    """Start a Python process for multiprocessing; fork it from this one, which has everything loaded, if it is a fork server."""
    if "multiprocessing.forkserver" not in words[-1]:
        return _spawn(path, words, passed)  # type: ignore[arg-type]
    util.spawnv_passfds = _spawn  # the next server, if this one is killed, would lack the threads that this process has by then
    if pid := os.fork():
        return pid
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (0, 1, 2, *passed):
            with suppress(OSError):  # the listing itself was a descriptor
                os.close(int(name))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as `server_signals` does, which is loaded already
    try:
        exec(words[-1], {})
    finally:
        os._exit(0)
