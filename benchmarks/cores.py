"""The benchmark of cores: how equal the cores of this machine are while they are busy, and whether choosing among them helps.

python benchmarks/cores.py            both tables, printed: two minutes
python benchmarks/cores.py --quick    a few turns
python benchmarks/cores.py --save     also writes docs/benchmarks/<date>-cores.md

On a virtual machine two cores may run on the two threads of one physical core. Each then has about half of its speed, for seconds
or minutes, and the machine does not say so. A process on each core counts how often it gets around a loop: no message, no memory
and no other process of ours is in its way.
"""

import time
from dataclasses import dataclass, field
from functools import cache
from statistics import median

from sheet import UNJUDGED, Case, Row, Script, Section

from recycle.evaluate.hardware.core_keepalive import EvenCores, keepers
from recycle.profiling.machine import usable_cores
from recycle.profiling.worker_pool import LEAST_EVENNESS

WORKERS = 12
BUSY_S, WINDOW_S = 1.0, 0.5
FIRST, CHOSEN = "the first", "chosen before each turn"


@dataclass
class Turns:
    """The speeds of the cores that were busy, as shares of the fastest, by turn."""

    speeds: list[dict[int, float]] = field(default_factory=list)

    def add(self, speeds: dict[int, float]) -> None:
        highest = max(speeds.values())
        self.speeds.append({core: speed / highest for core, speed in speeds.items()})

    @property
    def evenness(self) -> list[float]:
        """The speed of the slowest core of each turn."""
        return [min(speeds.values()) for speeds in self.speeds]

    def of(self, core: int) -> list[float]:
        return [speeds[core] for speeds in self.speeds if core in speeds]


@cache
def measure(num_turns: int) -> dict[str, Turns]:
    """Both ways in turn. In a turn the cores are busy for a while, and then their speeds are measured."""
    num = min(WORKERS, len(usable_cores()))
    found = {FIRST: Turns(), CHOSEN: Turns()}
    with keepers(usable_cores()) as kept:
        chosen = EvenCores(usable_cores(), num, kept.speeds)
        for _ in range(num_turns):
            for name, turns in found.items():
                own = usable_cores()[:num] if name == FIRST else chosen.choose()
                kept.keep_awake(own)
                time.sleep(BUSY_S)
                turns.add(kept.speeds(own, WINDOW_S))
    return found


def by_choice(num_turns: int, name: str) -> Row:
    evenness = measure(num_turns)[name].evenness
    num_slow = sum(each < LEAST_EVENNESS for each in evenness)
    return f"{name}", f"{median(evenness):.0%}", f"{min(evenness):.0%}", f"{num_slow} of {len(evenness)}", UNJUDGED


def by_core(num_turns: int, core: int) -> Row:
    speeds = [speed for turns in measure(num_turns).values() for speed in turns.of(core)]
    if not speeds:
        return str(core), "–", "–", "never busy", UNJUDGED
    num_slow = sum(each < LEAST_EVENNESS for each in speeds)
    return str(core), f"{median(speeds):.0%}", f"{min(speeds):.0%}", f"{num_slow} of {len(speeds)}", UNJUDGED


def sections(name: str, is_quick: bool) -> list[Section]:
    num_turns = 2 if is_quick else 25
    num = min(WORKERS, len(usable_cores()))
    speeds = f"Speeds are shares of that of the fastest core in the same turn. Slow is less than {LEAST_EVENNESS:.0%} of it."
    if name == "choices":
        about = f"{num} of {len(usable_cores())} cores are busy for {BUSY_S:g} s, and are then measured. {speeds}"
        cases = [Case(each, lambda each=each: by_choice(num_turns, each)) for each in (FIRST, CHOSEN)]  # type: ignore[misc]
        return [Section(name, "The slowest core of a turn", about, ("cores", "median", "lowest", "slow", "met"), tuple(cases))]
    header = ("core", "median speed", "lowest", "slow", "met")
    of_cores = [Case(f"core {core}", lambda core=core: by_core(num_turns, core)) for core in usable_cores()]  # type: ignore[misc]
    return [Section(name, "Each core", speeds, header, tuple(of_cores))]


if __name__ == "__main__":
    raise SystemExit(
        Script("cores", __doc__ or "", ("choices", "each"), "few turns", libraries=(), quantity="differences").run(sections)
    )
