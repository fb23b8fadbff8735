"""The processes of a job that runs in a session of its own: which there are, and how they are killed or stopped from outside."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests.warm_processes import WarmProcess

KINDS = ("launcher", "coordinator", "planner", "worker", "fork server", "resource tracker")


@dataclass(frozen=True)
class JobProcess:
    pid: int
    kind: str
    title: str


def processes_of(leader: int) -> list[JobProcess]:
    """The running processes of the session that `leader` began."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            state, _, _, session = (path / "stat").read_text().rpartition(") ")[2].split()[:4]
            if int(session) == leader and state != "Z":
                title = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found.append(JobProcess(int(path.name), _kind(int(path.name) == leader, title), title))
    return sorted(found, key=lambda process: process.pid)


def _kind(is_leader: bool, title: str) -> str:
    if is_leader:
        return "launcher"
    for kind in ("coordinator", "planner", "worker"):
        if title.startswith(f"recycle {kind}"):
            return kind
    return "resource tracker" if "resource_tracker" in title else "fork server"


def hit(pid: int, seconds: float) -> None:
    """Kill a process, or stop it for so long; returns at once."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP if seconds else signal.SIGKILL)
    if seconds:
        timer = threading.Timer(seconds, _continue, (pid,))
        timer.daemon = True
        timer.start()


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def end_session(leader: subprocess.Popen[bytes] | WarmProcess) -> None:
    """Kill every process of the session that a process began."""
    deadline_s = time.monotonic() + 30
    while (left := processes_of(leader.pid)) and time.monotonic() < deadline_s:
        for process in left:
            hit(process.pid, 0.0)
        time.sleep(0.05)
    leader.wait(10)


class JobSession:
    """A job in a session of its own, started again until it has a result. Use it as a context: nobody is left behind."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self._words = folder, words
        self.num_starts = 0
        self.errors: list[str] = []
        self.start()

    def start(self) -> None:
        if self.num_starts and self.process.returncode != -signal.SIGKILL:
            self.errors.append(f"exit code {self.process.returncode}: {self.log()[-300:].strip()}")
        self.num_starts += 1
        command = [sys.executable, "-m", "tests.chaos.job", str(self.folder), *self._words]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, start_new_session=True, stdout=log, stderr=log)

    @property
    def has_result(self) -> bool:
        return (self.folder / "result.json").exists()

    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def processes(self) -> list[JobProcess]:
        return processes_of(self.process.pid)

    def __enter__(self) -> "JobSession":
        return self

    def __exit__(self, *_: object) -> None:
        end_session(self.process)
