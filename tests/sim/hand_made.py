"""A job with round numbers, for cases that are worked out by hand: a step of 1 s, of which workers compute 0.8 s."""

from dataclasses import dataclass

from recycle.core.cluster import Shape
from recycle.core.events.record import Spell
from recycle.core.events.trace import Change, Trace
from recycle.sim.campaign.trace_simulation import simulate_trace
from recycle.sim.iteration_times import IterationTime

SECOND = 1_000_000


@dataclass(frozen=True)
class HandMade:
    """Stands for a job: four micro-batches of one sample for each pipeline."""

    num_pipelines: int
    num_stages: int = 2
    scale: float = 1.0

    @property
    def shape(self):
        return Shape(self.num_pipelines, self.num_stages, 4)

    @property
    def num_nodes(self):
        return self.num_pipelines * self.num_stages

    @property
    def samples_per_step(self):
        return 4 * self.num_pipelines

    @property
    def timing(self):
        return IterationTime(SECOND, 5 * SECOND // 4, 4 * SECOND // 5 * self.num_nodes, (0,) * self.num_stages)

    def scaled_us(self, time_us):
        return round(time_us * self.scale)


def trace(job, *changes, end_s, absent=(), spares=()):
    """All nodes of the job but the `absent` ones, the spares, and changes such as (10.5, "remove", "W0_0")."""
    names = [*(name for name in map(str, job.shape.workers()) if name not in absent), *spares]
    later = (Change(round(at_s * SECOND), word == "add", name) for at_s, word, name in changes)
    return Trace((*(Change(0, True, name) for name in names), *later), round(end_s * SECOND))


def spells(system, given):
    return [event for event in simulate_trace(system, given, system.job.shape) if isinstance(event, Spell)]


def spell_rows(found):
    """Start and end in seconds, state, cause, samples added, samples worked on in vain."""
    return [
        (spell.start_us / SECOND, spell.end_us / SECOND, spell.state, spell.cause, spell.samples, spell.discarded)
        for spell in found
    ]
