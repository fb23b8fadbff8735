"""Time and memory of the 1F1B schedule in closed form, for systems that choose their depth without a planner."""

from recycle.core.profile import Profile


def latencies_us(profile: Profile) -> list[int]:
    """The time of one micro-batch at each stage, forward and whole backward."""
    return [stage.forward_us + stage.fused_us for stage in profile.stages]


def pipeline_us(profile: Profile, num_microbatches: int) -> int:
    """The time of 1F1B until the last gradient: one micro-batch through all stages, then the others at the slowest stage."""
    latencies = latencies_us(profile)
    travel_us = 2 * sum(profile.comm_us(stage) for stage in range(len(latencies) - 1))
    return sum(latencies) + (num_microbatches - 1) * max(latencies) + travel_us


def most_bytes(profile: Profile, num_microbatches: int, times: int = 1) -> int:
    """The memory of the fullest worker: the state of its stage, and `times` the activations of its micro-batches in flight."""
    num_stages = len(profile.stages)
    return max(
        stage.static_bytes + stage.activation_bytes * min(num_microbatches, times * (num_stages - number))
        for number, stage in enumerate(profile.stages)
    )
