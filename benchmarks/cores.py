"""The benchmark of cores: how equally fast the cores of this machine are while they are busy.

python benchmarks/cores.py            both tables, printed: a minute
python benchmarks/cores.py --quick    a few turns
python benchmarks/cores.py --save     also writes docs/benchmarks/<date>-cores.md

A virtual core runs on one of the two threads of a physical core. If another program has the second one, each has about half of
the speed, for seconds or minutes, and the machine does not say so. A process on each core counts how often it multiplies the
same two small matrices: no message, no shared memory and no other process of ours is in its way.
"""

import select
import subprocess
import sys
import time
from functools import cache
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from sheet import UNJUDGED, Case, Row, Script, Section

from recycle.profiling.machine import usable_cores

WORKERS, WINDOW_S, SLOW_BELOW = 12, 0.5, 0.75
_START_S = 0.05  # all have been told by then
_ANSWER_S = 120.0  # also while torch is imported on a busy machine
_COUNT = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
import torch
torch.set_num_threads(1)
left, right = torch.randn(128, 256), torch.randn(256, 256)
found = torch.empty(128, 256)
print("ready", flush=True)
for line in sys.stdin:
    begin, end = map(float, line.split())
    while time.monotonic() < begin:
        pass
    count = 0
    while time.monotonic() < end:
        for _ in range(20):
            torch.mm(left, right, out=found)
        count += 1
    print(count / (time.monotonic() - begin), flush=True)
"""

Speeds = dict[int, float]
"""By core, in rounds of a loop per second, or over the highest speed of all."""


class Turns(NamedTuple):
    """The speeds of the first cores and of all cores, turn by turn, over the highest speed of all turns."""

    some: list[Speeds]
    every: list[Speeds]


class Counters:
    """A process on each core that counts when it is told to."""

    def __init__(self, cores: list[int]) -> None:
        piped = subprocess.PIPE
        # In sessions of their own: an interrupt is for the parent, which ends them.
        self._processes = {
            core: subprocess.Popen(
                [sys.executable, "-c", _COUNT, str(core)], bufsize=1, stdin=piped, stdout=piped, text=True, start_new_session=True
            )
            for core in cores
        }
        for core in cores:
            self._line(core)

    def __enter__(self) -> "Counters":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.communicate()

    def speeds(self, cores: list[int]) -> Speeds:
        """The speeds of these cores, all busy at the same time. The others sleep."""
        begin = time.monotonic() + _START_S
        for core in cores:
            pipe = self._processes[core].stdin
            assert pipe is not None
            print(begin, begin + WINDOW_S, file=pipe)
        return {core: float(self._line(core)) for core in cores}

    def _line(self, core: int) -> str:
        pipe = self._processes[core].stdout
        assert pipe is not None
        if not select.select([pipe], [], [], _ANSWER_S)[0]:
            sys.exit(
                f"cores: the process on core {core} has not answered within {_ANSWER_S:g} s: run it again on a quieter machine"
            )
        if not (line := pipe.readline()):
            sys.exit(f"cores: the process on core {core} has ended: its error is above")
        return line


@cache
def measure(num_turns: int) -> Turns:
    cores = list(usable_cores())
    with Counters(cores) as counters:
        found = Turns([], [])
        for _ in range(num_turns):
            found.some.append(counters.speeds(cores[:WORKERS]))
            found.every.append(counters.speeds(cores))
    highest = max(speed for turns in found for speeds in turns for speed in speeds.values())
    return Turns(*([{core: speed / highest for core, speed in speeds.items()} for speeds in turns] for turns in found))


def fastest(speeds: Speeds) -> list[int]:
    """The cores that would have been the best choice for the workers."""
    return sorted(speeds, key=lambda core: -speeds[core])[:WORKERS]


def first_cores(num_turns: int) -> Row:
    return f"the first {min(WORKERS, len(usable_cores()))}; the others sleep", *slowest(measure(num_turns).some)


def best_cores(num_turns: int) -> Row:
    turns = [{core: speeds[core] for core in fastest(speeds)} for speeds in measure(num_turns).every]
    return f"the {len(turns[0])} fastest of all in this turn; all are busy", *slowest(turns)


def later_cores(num_turns: int) -> Row:
    """A choice can be made by earlier speeds only."""
    every = measure(num_turns).every
    turns = [{core: now[core] for core in fastest(before)} for before, now in pairwise(every)]
    return f"the {len(turns[0])} fastest of all, a turn later", *slowest(turns)


def slowest(turns: list[Speeds]) -> Row:
    """The slowest core of each turn."""
    return *columns([min(speeds.values()) for speeds in turns]), UNJUDGED


def by_core(num_turns: int, core: int) -> Row:
    return str(core), *columns([speeds[core] for speeds in measure(num_turns).every]), UNJUDGED


def columns(speeds: list[float]) -> tuple[str, str, str, str]:
    """The median, the lowest, the highest, and how many are slow."""
    num_slow = sum(each < SLOW_BELOW for each in speeds)
    return f"{median(speeds):.0%}", f"{min(speeds):.0%}", f"{max(speeds):.0%}", f"{num_slow} of {len(speeds)}"


def sections(name: str, is_quick: bool) -> list[Section]:
    num_turns = 3 if is_quick else 25
    about = (
        f"In a turn cores are busy for {WINDOW_S:g} s. Speeds are shares of the highest one of all cores and turns. Slow is less "
        f"than {SLOW_BELOW:.0%} of it."
    )
    header = ("median", "lowest", "highest", "slow", "met")
    if name == "choices":
        rows = {"the first": first_cores, "the fastest": best_cores, "a turn later": later_cores}
        cases = [Case(label, lambda row=row: row(num_turns)) for label, row in rows.items()]  # type: ignore[misc]
        return [Section(name, "The slowest core of a turn", about, ("cores", *header), tuple(cases))]
    of_cores = [Case(f"core {core}", lambda core=core: by_core(num_turns, core)) for core in usable_cores()]  # type: ignore[misc]
    return [Section(name, "Each core, while all are busy", about, ("core", *header), tuple(of_cores))]


SCRIPT = Script("cores", __doc__ or "", ("choices", "each"), "few turns", libraries=("torch",), quantity="differences")

if __name__ == "__main__":
    raise SystemExit(SCRIPT.run(sections))
