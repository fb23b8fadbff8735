"""Even cores for the workers of a measurement on a virtual machine: kept awake, and exchanged if they are slower than others.

An idle virtual core sleeps, and when it wakes up its host may migrate it, often onto a busy physical core, until the host
rebalances a second or two later. Workers that wait for each other many times in an iteration are then slower at random, by a
quarter or by half. A core that never sleeps is migrated less. So a process of the lowest priority keeps each worker's core busy;
it yields at once to any other process.

Even so, two virtual cores may run on the two threads of one physical core, for seconds or minutes, each at about half its speed.
The guest cannot see that, but it can measure it: while the workers wait, the same processes count how often they get around
a loop. A core that is slow before a turn is exchanged for a spare one; a turn after which one is slow is done once more.
"""

import select
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import IO

from recycle.profiling.machine import a_core_each, usable_cores
from recycle.profiling.worker_pool import LEAST_EVENNESS

Measure = Callable[[Sequence[int]], Mapping[int, float]]
"""The speeds of cores that are all busy."""

_CPU_INFO, _QUOTA = Path("/proc/cpuinfo"), Path("/sys/fs/cgroup/cpu.max")
_MEASURED_S, _ANSWER_S, _MOST_TRIES = 0.15, 60.0, 12
# The highest speed is that of so many measurements: a machine need not stay as fast as it was for a moment.
_NUM_REMEMBERED = 100
# It rests until it is told to spin, and ends when its parent ends, even if the parent is killed: its input ends then.
_KEEPER = """
import os, select, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
is_spinning = False
while True:
    if is_spinning and not select.select([0], [], [], 0)[0]:
        for _ in range(10_000):
            pass
        continue
    told = os.read(0, 4096).decode().splitlines()
    if not told:
        break
    for word, *numbers in map(str.split, told):
        is_spinning = word != 'rest'
        if word == 'measure':
            count, begin = 0, time.perf_counter()
            while (took := time.perf_counter() - begin) < float(numbers[1]):
                for _ in range(2_000):
                    pass
                count += 1
            os.write(1, b'%s %g\\n' % (numbers[0].encode(), count / took))
"""


def are_cores_migrated() -> bool:
    """Whether the cores belong to a hypervisor, which only x86 reports, and have no CPU quota that a keepalive would use up."""
    has_quota = _QUOTA.exists() and not _QUOTA.read_text(encoding="utf-8").startswith("max")
    return _CPU_INFO.exists() and " hypervisor" in _CPU_INFO.read_text(encoding="utf-8") and not has_quota


class Keepers:
    """A process on each core, which rests, or keeps the core awake."""

    def __init__(self, pipes: Mapping[int, tuple[IO[bytes], IO[bytes]]]) -> None:
        self._pipes, self._numbers = pipes, count()

    def _tell(self, core: int, what: str) -> None:
        self._pipes[core][0].write(f"{what}\n".encode())

    def keep_awake(self, cores: Sequence[int]) -> None:
        """Keep these cores awake, and let the others sleep."""
        for core in self._pipes:
            self._tell(core, "spin" if core in cores else "rest")

    def speeds(self, cores: Sequence[int], seconds: float = _MEASURED_S) -> dict[int, float]:
        """The speeds of these cores, all busy at the same time, in rounds of a loop per second. The others sleep."""
        self.keep_awake(cores)
        number = next(self._numbers)
        for core in cores:
            self._tell(core, f"measure {number} {seconds}")
        return {core: self._answer(core, number) for core in cores}

    def _answer(self, core: int, number: int) -> float:
        """The answer to the measurement of this number; those before it came too late."""
        _, answers = self._pipes[core]
        while select.select([answers], [], [], _ANSWER_S)[0]:
            found, speed = answers.readline().split()  # none if the keeper has ended, which is a ValueError
            if int(found) == number:
                return float(speed)
        raise TimeoutError(f"core {core} has not answered within {_ANSWER_S:g} s")


class EvenCores:
    """Chooses a core for each of `num` workers so that none is slow; the others are spare."""

    def __init__(self, cores: Sequence[int], num: int, measure: Measure) -> None:
        self._measure = measure
        self.cores, self._spare = list(cores[:num]), deque(cores[num:])
        # All chosen cores may be slow: the spare ones show how fast a core can be.
        self._highest = deque([max(measure(self._spare).values())] if self._spare else [], _NUM_REMEMBERED)

    def choose(self) -> Sequence[int]:
        """Exchange slow cores for spare ones until none is slow, or for a while, and return the most even choice."""
        best, chosen = 0.0, self.cores
        for _ in range(_MOST_TRIES):
            shares = self._shares()
            if (evenness := min(shares.values())) > best:
                best, chosen = evenness, list(self.cores)
            slow = [number for number, core in enumerate(self.cores) if shares[core] < LEAST_EVENNESS]
            if not slow or not self._spare:
                break
            for number in sorted(slow, key=lambda number: shares[self.cores[number]])[: len(self._spare)]:
                self._spare.append(self.cores[number])
                self.cores[number] = self._spare.popleft()
        every = [*self.cores, *self._spare]
        self.cores, self._spare = list(chosen), deque(core for core in every if core not in chosen)
        if best < LEAST_EVENNESS:
            print(f"cores are uneven: the slowest has {best:.0%} of the highest speed", file=sys.stderr)
        return self.cores

    def evenness(self) -> float:
        """The speed of the slowest of the chosen cores now, over the highest speed."""
        return min(self._shares().values())

    def _shares(self) -> dict[int, float]:
        """The speeds of the chosen cores now, over the highest speed."""
        speeds = self._measure(self.cores)
        self._highest.append(max(speeds.values()))
        highest = max(self._highest)
        return {core: speed / highest for core, speed in speeds.items()}


class MeasuredCores:
    """A choice among cores that keepers measure.

    They keep the workers' cores awake, or all cores if there are no workers, or more workers than cores.
    """

    def __init__(self, kept: Keepers, cores: Sequence[int]) -> None:
        self._kept, self._cores = kept, cores
        self._choices: dict[int, EvenCores] = {}
        self._choice: EvenCores | None = None

    def choose(self, num_workers: int) -> Sequence[int]:
        """A core for each worker so that none is slow; the first ones if they cannot be measured."""
        self._choice = None
        try:
            if not 0 < num_workers <= len(self._cores):
                self._kept.keep_awake(self._cores)
                return ()
            if num_workers not in self._choices:
                self._choices[num_workers] = EvenCores(self._cores, num_workers, self._kept.speeds)
            own = self._choices[num_workers].choose()
            self._kept.keep_awake(own)
            self._choice = self._choices[num_workers]
            return own
        except (OSError, ValueError) as problem:  # a keeper was not allowed to do its work, or has ended
            print(f"the speeds of cores cannot be measured: {problem}", file=sys.stderr)
            return a_core_each(num_workers)

    def evenness(self) -> float | None:
        """That of the cores that were chosen last; None if none were, or if they cannot be measured."""
        try:
            return None if self._choice is None else self._choice.evenness()
        except (OSError, ValueError) as problem:
            print(f"the speeds of cores cannot be measured: {problem}", file=sys.stderr)
            return None


@contextmanager
def keepers(cores: Sequence[int]) -> Iterator[Keepers]:
    """A keeper on each of these cores; all rest at first."""
    with ExitStack() as stack:
        pipes = {}
        for core in cores:
            command = [sys.executable, "-S", "-c", _KEEPER, str(core)]
            piped = subprocess.PIPE  # unbuffered, so that nothing is left to be written to a keeper that has ended
            # In a session of its own: an interrupt is for the parent, which ends it.
            process = stack.enter_context(
                subprocess.Popen(command, bufsize=0, stdin=piped, stdout=piped, stderr=subprocess.DEVNULL, start_new_session=True)
            )
            stack.callback(process.kill)
            assert process.stdin is not None
            assert process.stdout is not None
            pipes[core] = process.stdin, process.stdout
        yield Keepers(pipes)


@contextmanager
def even_cores() -> Iterator[MeasuredCores]:
    """The cores of this machine, measured and kept awake."""
    cores = usable_cores()
    with keepers(cores) as kept:
        measured = MeasuredCores(kept, cores)
        measured.choose(0)
        yield measured
