"""The benchmark of cores: how equal the cores of this machine are while they are busy, and whether choosing among them helps.

python benchmarks/cores.py            both tables, printed: two minutes
python benchmarks/cores.py --quick    a few turns
python benchmarks/cores.py --save     also writes docs/benchmarks/<date>-cores.md

On a virtual machine two cores may run on the two threads of one physical core. Each then has about half of its speed, for seconds
or minutes, and the machine does not say so. A process on each core counts how often it gets around a loop: no message, no memory
and no other process of ours is in its way.
"""

import time
from functools import cache
from statistics import median

from sheet import UNJUDGED, Case, Row, Script, Section

from recycle.evaluate.hardware.core_keepalive import EvenCores, keepers
from recycle.profiling.machine import usable_cores
from recycle.profiling.worker_pool import LEAST_EVENNESS

WORKERS = 12
BUSY_S, WINDOW_S = 1.0, 0.5
FIRST, CHOSEN = "the first", "chosen before each turn"


@cache
def measure(num_turns: int) -> dict[str, list[dict[int, float]]]:
    """Both ways in turn: by turn, the speeds of the cores that were busy, over the highest speed of all turns.

    In a turn the cores are busy for a while, and then their speeds are measured.
    """
    num = min(WORKERS, len(usable_cores()))
    found: dict[str, list[dict[int, float]]] = {FIRST: [], CHOSEN: []}
    with keepers(usable_cores()) as kept:
        chosen = EvenCores(usable_cores(), num, kept.speeds)
        for _ in range(num_turns):
            for name, turns in found.items():
                own = usable_cores()[:num] if name == FIRST else chosen.choose()
                kept.keep_awake(own)
                time.sleep(BUSY_S)
                turns.append(kept.speeds(own, WINDOW_S))
    highest = max(speed for turns in found.values() for speeds in turns for speed in speeds.values())
    return {
        name: [{core: speed / highest for core, speed in speeds.items()} for speeds in turns] for name, turns in found.items()
    }


def by_choice(num_turns: int, name: str) -> Row:
    return name, *columns([min(speeds.values()) for speeds in measure(num_turns)[name]]), UNJUDGED


def by_core(num_turns: int, core: int) -> Row:
    own = [speeds[core] for turns in measure(num_turns).values() for speeds in turns if core in speeds]
    return str(core), *(columns(own) if own else ("–", "–", "never busy")), UNJUDGED


def columns(speeds: list[float]) -> tuple[str, str, str]:
    """The median, the lowest, and how many are slow."""
    num_slow = sum(each < LEAST_EVENNESS for each in speeds)
    return f"{median(speeds):.0%}", f"{min(speeds):.0%}", f"{num_slow} of {len(speeds)}"


def sections(name: str, is_quick: bool) -> list[Section]:
    num_turns = 2 if is_quick else 25
    num = min(WORKERS, len(usable_cores()))
    speeds = f"Speeds are shares of the highest one of all turns. Slow is less than {LEAST_EVENNESS:.0%} of it."
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
