"""1F1B in closed form: what systems that cut a model anew expect of a depth, before anybody plans for it."""

from recycle.core.profile import Profile


def latencies_us(profile: Profile) -> list[int]:
    """What one micro-batch takes at each stage, forward and whole backward."""
    return [stage.forward_us + stage.fused_us for stage in profile.stages]


def pipeline_us(profile: Profile, num_microbatches: int) -> int:
    """The time of 1F1B until the last gradient: one micro-batch through all stages and back, the others behind the slowest."""
    latencies = latencies_us(profile)
    travel_us = 2 * sum(profile.comm_us(stage) for stage in range(len(latencies) - 1))
    return sum(latencies) + (num_microbatches - 1) * max(latencies) + travel_us


def most_bytes(profile: Profile, num_microbatches: int) -> int:
    """What the fullest worker holds: its stage's states, and the activations of 1F1B's micro-batches in flight."""
    num_stages = len(profile.stages)
    return max(
        stage.static_bytes + stage.activation_bytes * min(num_microbatches, num_stages - number)
        for number, stage in enumerate(profile.stages)
    )
