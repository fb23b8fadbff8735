"""Seeded schedules: a coordinator and its workers under one virtual clock, with joins, deaths, hangs, stalls, restarts and
replaced coordinators that wake up.

A seed decides everything, so that a schedule that fails replays exactly:

    python -m tests.control.decide.schedules --first 4711 --num 1       replay one
    python -m tests.control.decide.schedules --num 1000000              many of them, in all processors

After every schedule nothing more fails: then training must go on with all live workers, or say what it waits for. The machine
checks every epoch that starts: its members live, every stage has one, and no more work is redone than has to be.
"""

import sys
from collections import Counter
from random import Random

from recycle.core.cluster import Shape
from tests.chaos.seeds import main
from tests.control.decide.test_recovery_machine import RecoveryMachine

SHAPES = (Shape(3, 2, 3), Shape(2, 2, 2), Shape(2, 3, 2), Shape(4, 1, 2), Shape(1, 3, 2))
# What happens, and how often of all.
EVENTS = {"join": 5, "kill": 4, "hang": 2, "wait": 4, "stall": 2, "restart": 2, "wake": 2, "corrupt": 1, "disconnect": 1}
MOST_EVENTS = 25
# How many actions of workers (to receive, compute, report) happen between two of these.
_ACTIONS = (0, 1, 3, 8, 20, 50)


def run_schedule(seed: int) -> Counter[str]:
    """Run the schedule of a seed, and return what happened in it; raises AssertionError if an invariant does not hold."""
    random = Random(seed)
    machine = RecoveryMachine()
    machine.shape = random.choice(SHAPES)
    num_first = random.choice([0, machine.shape.num_workers - 1, *[machine.shape.num_workers] * 3])
    machine.begin(is_staggered=random.random() < 0.5, is_moving=random.random() < 0.5, num_first=num_first)
    happened: Counter[str] = Counter()
    for _ in range(random.randrange(1, MOST_EVENTS)):
        (event,) = random.choices(list(EVENTS), list(EVENTS.values()))
        # The machine lets workers act, in an order by this number, as often as it says modulo 120.
        acting, pick = 120 * random.randrange(2**25) + random.choice(_ACTIONS), random.randrange(100)
        match event:
            case "join":
                machine.join(random.choice([None, *machine.shape.workers()]), acting)
            case "wait":
                machine.wait(random.choice([0.5, 1.0]), acting)
            case "stall":
                machine.stall(random.choice([0.6, 1.9, 12.0, 130.0]), acting)
            case "restart":
                if machine.coordinator.epoch > 0:
                    machine.restart(random.random() < 0.5, acting)
            case _:
                getattr(machine, event)(pick, acting)
        happened[event] += 1
    happened["epoch refused"] += machine.num_refused
    machine.settle()
    return happened


if __name__ == "__main__":
    sys.exit(main(run_schedule, "Run seeded schedules of failures of the coordinator's decisions."))
