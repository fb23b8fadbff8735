"""FaultInjector: a worker kills, stops, delays or fails itself at the moment that the failure script names."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from recycle.core.cluster import Worker
from recycle.core.events import failure_script as script
from recycle.core.events import op_columns
from recycle.core.events.failure_script import RECOVERY, TRANSFER, Action, Injection
from recycle.runtime.execute.row_program import Instruction
from recycle.runtime.execute.spans import now_us
from recycle.runtime.transport.rendezvous import Rendezvous

# Where an end of a slow link says its place, and how long the other end waits for that.
_LINK_END, _LINK_END_S = "slow link", 1.0
# The executor's labels of moments that the script names differently.
_LABELS = {script.REDUCE: op_columns.REDUCE, script.STEP: op_columns.OPTIMIZER}


class FaultInjector:
    """The injections of one process; each happens once. Their times are appended to the file `deaths`.

    `instructions` are those of the epoch: they decide which op is the first, the last or the middle one. `parameters` are those
    of the stage.
    """

    def __init__(self, injections: Sequence[Injection], deaths: Path | None) -> None:
        self._left = [each for each in injections if not each.is_slowness]
        self._speeds = [each for each in injections if each.speed]
        self._links = [each for each in injections if each.other is not None]
        self._deaths, self._iteration = deaths, 0
        self._link_ends: Mapping[Worker, Worker] = {}  # present places of processes, by the places for which they were started
        self.instructions: Sequence[Instruction] = ()
        self.parameters: Sequence[Tensor] = ()

    def on_progress(self, iteration: int, label: str) -> None:
        """Inject the failures for this moment of an iteration."""
        self._iteration = iteration
        self._inject(lambda each: each.iteration == iteration and self._label(each) == label)

    def speed_in(self, iteration: int) -> float:
        """The speed at which ops of an iteration run: the lowest that the script gives."""
        return min((each.speed for each in self._speeds if each.is_slow_in(iteration)), default=1.0)

    def find_link_ends(self, store: Rendezvous, place: Worker, started_for: Worker | None) -> None:
        """Find the processes to which this one has slow links: these stay slow if places change. Both ends must call this."""
        names = {end for each in self._links for end in (each.target, each.other)}
        if not names or started_for is None:
            return
        store.set(f"{_LINK_END}/{started_for}", str(place))
        keys = {f"{_LINK_END}/{end}": end for end in names if end is not None and end != started_for}
        missing = store.fetch(list(keys), _LINK_END_S)
        found = {end: store.get(key).decode() for key, end in keys.items() if key not in missing}
        self._link_ends = {end: Worker.parse(text) for end, text in found.items()}

    def delay_s_to(self, receiver: Worker) -> float:
        """By how many seconds messages to the worker at a place are delayed now."""
        delay_s = 0.0
        for each in self._links:
            is_it = any(self._link_ends.get(end) == receiver for end in (each.target, each.other) if end is not None)
            if is_it and each.is_slow_in(self._iteration):
                delay_s += each.seconds
        return delay_s

    def on_recovery(self, iteration: int) -> None:
        """Inject the failures for a recovery that resumes at `iteration`: that of the failure, or the one after it."""
        self._inject(lambda each: each.at == RECOVERY and each.iteration in (iteration, iteration - 1))

    def on_transfer(self, iteration: int) -> None:
        """Inject the failures for a copy of a stage's state, in an epoch that begins with `iteration`."""
        self._inject(lambda each: each.at == TRANSFER and each.iteration <= iteration)

    def _inject(self, is_due: Callable[[Injection], bool]) -> None:
        for injection in [each for each in self._left if is_due(each)]:
            self._left.remove(injection)
            self._execute(injection)

    def _label(self, injection: Injection) -> str:
        if injection.action is Action.CORRUPT:
            return op_columns.OPTIMIZER
        indices = {script.FIRST: 0, script.MIDDLE: len(self.instructions) // 2, script.LAST: -1}
        if injection.at in indices:
            return self.instructions[indices[injection.at]].label
        return _LABELS.get(injection.at, injection.at)

    def _execute(self, injection: Injection) -> None:
        if injection.action not in (Action.REJOIN, Action.CORRUPT):  # the launcher's part; and nobody dies of the other
            self._note_time()
        match injection.action:
            case Action.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Action.HANG:
                if injection.seconds:
                    subprocess.Popen(["sh", "-c", _wake_up(os.getpid(), injection.seconds)], start_new_session=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            case Action.SLOW:
                time.sleep(injection.seconds)
            case Action.CORRUPT:
                bits = self.parameters[0].detach().view(-1)[:1].view(torch.uint8)
                bits[0] ^= 1
            case Action.FAIL:
                raise RuntimeError("this failure was asked for")

    def _note_time(self) -> None:
        """Write the time of the failure, since a dead process cannot report it."""
        if self._deaths is not None:
            with self._deaths.open("a", encoding="ascii") as stream:
                stream.write(f"{os.getpid()} {now_us()}\n")


def _wake_up(pid: int, seconds: float) -> str:
    """A shell command that continues a stopped process after a while; it ends by itself if the process is gone."""
    whole, rest = divmod(seconds, 1)
    wait = f'left={int(whole)}; while [ "$left" -gt 0 ] && kill -0 {pid}; do sleep 1; left=$((left - 1)); done'
    return f"exec 2>/dev/null; sleep {rest:.6f}; {wait}; kill -CONT {pid}"


def death_us(deaths: Path, pid: int) -> int:
    """When a process noted that it was about to fail; 0 if it did not."""
    try:
        lines = [line.split() for line in deaths.read_text(encoding="ascii").splitlines()]
    except OSError:
        return 0
    return next((int(line[1]) for line in reversed(lines) if len(line) == 2 and line[0] == str(pid)), 0)


def kill_coordinator(injections: Sequence[Injection], num_steps: int, is_recovery: bool = False) -> None:
    """Kill this process, which is a coordinator, if a failure script says so; its launcher starts another one."""
    for injection in injections:
        if injection.iteration <= num_steps and (injection.at == RECOVERY) == is_recovery:
            os.kill(os.getpid(), signal.SIGKILL)
