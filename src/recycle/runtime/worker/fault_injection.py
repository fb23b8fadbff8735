"""Failures on purpose: a worker that does to itself what its script says, at the very moment that the script names."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from recycle.core.events import failure_script as script
from recycle.core.events import record
from recycle.core.events.failure_script import RECOVERY, Action, Injection
from recycle.runtime.execute.row_program import Instruction
from recycle.runtime.execute.spans import now_us

# What the executor calls the moments that the script calls otherwise.
_MOMENTS = {script.REDUCE: record.REDUCE, script.STEP: record.OPTIMIZER}


class FaultInjector:
    """One process's share of a script. What was done is not done again."""

    def __init__(self, injections: Sequence[Injection], deaths: Path | None) -> None:
        self._left = list(injections)
        self._deaths = deaths
        self._turns: Sequence[Instruction] = ()

    def play(self, turns: Sequence[Instruction]) -> None:
        """These are the turns from now on: they say which op is the first, the last or the one in the middle."""
        self._turns = turns

    def reached(self, iteration: int, what: str) -> None:
        """Do what is due."""
        due = [each for each in self._left if each.iteration == iteration and self._moment(each) == what]
        for injection in due:
            self._left.remove(injection)
            self._do(injection)

    def recovering(self, iteration: int) -> None:
        """A recovery has begun, after which all go on at `iteration`: that of the failure, or the one after it."""
        due = [each for each in self._left if each.at == RECOVERY and each.iteration in (iteration, iteration - 1)]
        for injection in due:
            self._left.remove(injection)
            self._do(injection)

    def _moment(self, injection: Injection) -> str:
        match injection.at:
            case script.MIDDLE:
                return self._turns[len(self._turns) // 2].label
            case script.FIRST:
                return self._turns[0].label
            case script.LAST:
                return self._turns[-1].label
        return _MOMENTS.get(injection.at, injection.at)

    def _do(self, injection: Injection) -> None:
        match injection.action:
            case Action.KILL:
                self._say_when()
                os.kill(os.getpid(), signal.SIGKILL)
            case Action.HANG:
                self._say_when()
                if injection.seconds:
                    subprocess.Popen(["sh", "-c", _wake_up(os.getpid(), injection.seconds)], start_new_session=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            case Action.SLOW:
                self._say_when()
                time.sleep(injection.seconds)
            case Action.FAIL:
                self._say_when()
                raise RuntimeError("this failure was asked for")
            case _:
                pass

    def _say_when(self) -> None:
        """Leave a note of the moment, since nobody can tell of its own death."""
        if self._deaths is not None:
            with self._deaths.open("a", encoding="ascii") as stream:
                stream.write(f"{os.getpid()} {now_us()}\n")


def _wake_up(pid: int, seconds: float) -> str:
    """What a shell does to wake up a process that stands still, after a while; it ends by itself if the process is gone."""
    whole, rest = divmod(seconds, 1)
    wait = f'left={int(whole)}; while [ "$left" -gt 0 ] && kill -0 {pid}; do sleep 1; left=$((left - 1)); done'
    return f"exec 2>/dev/null; sleep {rest:.6f}; {wait}; kill -CONT {pid}"


def death_us(deaths: Path, pid: int) -> int:
    """When a process said that it was about to fail; 0 if it did not."""
    try:
        lines = [line.split() for line in deaths.read_text(encoding="ascii").splitlines()]
    except OSError:
        return 0
    return next((int(line[1]) for line in reversed(lines) if len(line) == 2 and line[0] == str(pid)), 0)
