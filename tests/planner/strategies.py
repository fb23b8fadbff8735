"""Random small problems for property tests of the planner: any failures, costs, links, memory and techniques that are allowed."""

from hypothesis import strategies as st

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.problem import Memory, Problem, Techniques
from recycle.core.profile import Link, Profile, StageProfile

shapes = st.builds(Shape, st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
# Small enough to try every plan.
tiny_shapes = st.sampled_from([Shape(2, 1, 1), Shape(2, 2, 1), Shape(2, 1, 2), Shape(3, 1, 1), Shape(1, 2, 2), Shape(1, 3, 1)])


@st.composite
def stage_profiles(draw: st.DrawFn) -> StageProfile:
    """Costs from 1 to 5, a fused backward that is cheaper than its parts, as long, or longer, and some bytes of everything."""
    forward, split, weight = (draw(st.integers(1, 5)) for _ in range(3))
    cheaper = st.integers(split, split + weight - 1)
    as_long = st.just(split + weight)
    longer = st.integers(split + weight + 1, split + weight + 3)
    activation = draw(st.integers(1, 6))
    return StageProfile(
        forward,
        split,
        weight,
        fused_us=draw(st.one_of(as_long, cheaper, longer)),
        optimizer_us=draw(st.integers(0, 4)),
        activation_bytes=activation,
        weight_held_bytes=draw(st.integers(0, activation)),
        static_bytes=draw(st.integers(0, 3)),
        gradient_bytes=draw(st.integers(0, 6)),
        output_bytes=draw(st.integers(0, 1)),
    )


def profiles(num_stages: int) -> st.SearchStrategy[Profile]:
    """Stages of unequal costs; a message between two stages takes 0 to 3 µs."""
    stages = st.tuples(*(stage_profiles() for _ in range(num_stages)))
    return st.builds(Profile, stages, st.builds(Link, st.integers(0, 2)), st.builds(Link, st.integers(0, 2), st.just(2.0)))


def failures(shape: Shape) -> st.SearchStrategy[frozenset[Worker]]:
    """Dead workers anywhere, as long as every stage keeps a live one."""
    dead_pipelines = st.sets(st.integers(0, shape.num_pipelines - 1), max_size=shape.num_pipelines - 1)
    by_stage = st.tuples(*(dead_pipelines for _ in range(shape.num_stages)))
    return by_stage.map(lambda sets: frozenset(Worker(p, stage) for stage, dead in enumerate(sets) for p in dead))


def memories(profile: Profile) -> st.SearchStrategy[Memory]:
    """Unlimited, or a limit by count or by bytes, from the least that works upwards."""
    counts = st.tuples(*(st.integers(1, 5) for _ in profile.stages))
    sizes = st.tuples(*(_bytes(stage) for stage in profile.stages))
    return st.one_of(st.just(Memory.unlimited()), counts.map(Memory.microbatches), sizes.map(Memory.bytes))


def _bytes(stage: StageProfile) -> st.SearchStrategy[int]:
    least = stage.static_bytes + stage.activation_bytes
    return st.integers(least, least + 4 * stage.activation_bytes)


@st.composite
def problems(draw: st.DrawFn, shape: st.SearchStrategy[Shape] = shapes) -> Problem:
    chosen = draw(shape)
    failed = draw(failures(chosen))
    profile = draw(profiles(chosen.num_stages))
    techniques = Techniques(bool(failed) or draw(st.booleans()), draw(st.booleans()), draw(st.booleans()))
    return Problem(Cluster(chosen, failed), profile, draw(memories(profile)), techniques)
