"""Seeded schedules of the whole control plane: what happens in each, and how it must end.

Each schedule has weights of its own for the events: some do not happen at all in it, others again and again. Mistakes that need
many events of one kind, and none of another, are found sooner so.
"""

from collections import Counter
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests.chaos.control_plane.plane import NUM_ACTIONS, ControlPlane
from tests.chaos.control_plane.virtual import CLOCK, virtual

EVENTS = {
    "kill": 4,
    "join": 4,
    "leave": 3,
    "hang": 2,
    "wake": 2,
    "disconnect": 2,
    "restart": 3,
    "wait": 3,
    "stall": 2,
    "corrupt": 1,
    "slow": 3,
    "freeze": 2,
    "thaw": 2,
    "lose_store": 1,
    "restore_store": 2,
}
WEIGHT_FACTORS = (0, 1, 1, 4)
MOST_EVENTS = 20


def run_schedule(seed: int) -> Counter[str]:
    """Run the schedule of a seed, and return what happened in it; raises AssertionError if an invariant does not hold."""
    random, happened = Random(seed), Counter[str]()
    with virtual(), TemporaryDirectory(dir="/dev/shm") as folder:
        weights = [weight * random.choice(WEIGHT_FACTORS) for weight in EVENTS.values()]
        (Path(folder) / "run").mkdir()
        plane = CLOCK.plane = ControlPlane(random, Path(folder) / "run")
        plane.act(random.choice([5, 40, 120]))
        for _ in range(random.randrange(1, MOST_EVENTS)):
            if plane.is_over or not any(weights):
                break
            (event,) = random.choices(list(EVENTS), weights)
            getattr(plane, event)()
            happened[event] += 1
            plane.act(random.choice(NUM_ACTIONS))
        plane.run_to_the_end()
        plane.check()
    return happened
