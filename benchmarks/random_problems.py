"""Random problems of all memory forms, for the planner's benchmark: the same ones on every machine."""

import random
from collections.abc import Callable
from dataclasses import replace

import recycle
from recycle.core.cluster import Cluster, Shape
from recycle.core.problem import Memory, Problem, Techniques
from recycle.core.profile import Link, Profile, StageProfile

ACTIVATION_BYTES, STATIC_BYTES = 1000, 700
# The part of the activations that stays between I and W, by memory form: the memory of a worker is given in bytes then.
_KEPT = {"bytes, all until W": 1.0, "bytes, half until W": 0.5, "bytes, a fifth until W": 0.2}
# Micro-batches in flight at a stage of S, for the forms that count micro-batches.
_IN_FLIGHT: dict[str, Callable[[random.Random, int, int], int]] = {
    "S": lambda _, stages, stage: stages,
    "S+1": lambda _, stages, stage: stages + 1,
    "3S/2": lambda _, stages, stage: -(-3 * stages // 2),
    "2S": lambda _, stages, stage: 2 * stages,
    "1F1B's own": lambda _, stages, stage: stages - stage,
    "by stage": lambda rng, stages, stage: rng.randint(stages - stage, 2 * stages),
}
MEMORY_FORMS = (*_IN_FLIGHT, *_KEPT, "unlimited")
_TECHNIQUES = ("adaptive,decoupled,staggered",) * 4 + ("adaptive,decoupled", "adaptive")


def random_problem(form: str, number: int) -> Problem:
    """Return a problem of a memory form: equal, uneven or one hot stage, messages of no time up to that of F, up to two dead."""
    rng = random.Random(f"{form} {number}")
    stages = rng.randint(2, 8)
    shape = Shape(rng.randint(1, 4), stages, rng.randint(stages, 3 * stages))
    kept = _KEPT.get(form, 1.0)
    profile = _random_profile(rng, stages, kept)
    techniques = Techniques.parse(rng.choice(_TECHNIQUES))
    dead = _random_dead(rng, shape)
    if form in _KEPT:
        in_flight = rng.choice([stages, stages + 1, -(-3 * stages // 2)])
        memory = Memory.bytes([STATIC_BYTES + in_flight * ACTIVATION_BYTES] * stages)
    elif form == "unlimited":
        memory = Memory.unlimited()
    else:
        memory = Memory.microbatches([_IN_FLIGHT[form](rng, stages, stage) for stage in range(stages)])
    return Problem(Cluster(shape, dead), profile, memory, techniques)


def _random_profile(rng: random.Random, num_stages: int, kept: float) -> Profile:
    forward, back, weight = rng.randint(80, 160), rng.uniform(0.8, 1.5), rng.uniform(0.6, 1.1)
    how = rng.choice(["equal", "equal", "hot", "uneven"])
    hot = rng.randrange(num_stages)
    made = []
    for stage in range(num_stages):
        factor = 1.3 if how == "hot" and stage == hot else rng.uniform(0.85, 1.15) if how == "uneven" else 1.0
        forward_us, input_us, weight_us = (max(1, round(forward * factor * part)) for part in (1.0, back, weight))
        costs = StageProfile(forward_us, input_us, weight_us, input_us + weight_us, static_bytes=STATIC_BYTES)
        made.append(replace(costs, activation_bytes=ACTIVATION_BYTES, weight_held_bytes=round(kept * ACTIVATION_BYTES)))
    comm_us = round(forward * rng.choice([0, 0.1, 0.3, 1.0]))
    return Profile(tuple(made), Link(comm_us, 1e9))


def _random_dead(rng: random.Random, shape: Shape) -> frozenset[recycle.Worker]:
    """Up to two dead workers, of different stages."""
    num = rng.choice([0, 1, 1, 2]) if shape.num_pipelines > 1 else 0
    stages = rng.sample(range(shape.num_stages), num)
    return frozenset(recycle.Worker(rng.randrange(shape.num_pipelines), stage) for stage in stages)
