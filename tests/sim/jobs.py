"""Small jobs and random traces for tests of systems."""

from hypothesis import strategies as st

from recycle.core.cluster import Shape
from recycle.core.events.trace import Change, Trace
from recycle.sim.job import SimulatedJob

SMALL = "layers=6,hidden=2048,heads=16,sequence=2048,vocabulary=1"


def small_job(num_pipelines=3, num_stages=2, num_microbatches=4, scale=10.0):
    """A job whose steps take about a second."""
    return SimulatedJob.of(SMALL, "a100-80", Shape(num_pipelines, num_stages, num_microbatches), scale=scale)


@st.composite
def traces(draw, shape, most_changes=12, end_s=3600):
    """Any trace of a cluster: nodes leave and join again in any order, several at once too."""
    names = [str(worker) for worker in shape.workers()]
    times = sorted(draw(st.lists(st.integers(0, end_s * 1000 - 1), max_size=most_changes)))
    present, changes = set(names), [Change(0, True, name) for name in names]
    for at_ms in times:
        name = draw(st.sampled_from(names))
        changes.append(Change(at_ms * 1000, name not in present, name))
        present ^= {name}
    return Trace(tuple(changes), end_s * 1_000_000)
