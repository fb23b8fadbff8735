"""FaultFreeSchedule: what a system runs while every worker is alive, beside and apart from how it handles failures.

Systems that keep the shape of the job take the iteration time of a plan: `SystemContext.fault_free_time`. Systems that choose
the depth of their pipelines need a closed form, `zero_bubble_idle_us`. 1F1B leaves the slowest stage idle while one micro-batch
passes all other stages, forward and backward. Zero Bubble (Qi et al., ICLR 2024) splits the backward pass, so that nobody waits
for weight gradients (W), and fills the rest of that time with W; every micro-batch that a worker can hold in flight is worth one
W. With k of them the idle time is

    sum over the other stages of (F + I)  +  messages there and back  -  (k - 1) * W, but at least 0

With k = S, the memory of 1F1B, that is (S - 1)(F + I - W) without messages, the published bubble of ZB-H1; with k = 2S - 1 it is
that of ZB-H2, (S - 1)(F + I - 2W). More micro-batches in flight fill more. tests/sim/test_fault_free_schedule.py compares it
with our plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class FaultFreeSchedule(Enum):
    """The schedule of a system while every worker is alive."""

    ONE_F_ONE_B = "1F1B"
    ZERO_BUBBLE = "zero bubble"

    @property
    def suffix(self) -> str:
        """What the name of a system ends in that runs this schedule in place of its published one."""
        return "-zb" if self is FaultFreeSchedule.ZERO_BUBBLE else ""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """F, I and W of one micro-batch at a stage, and how many micro-batches fit in its memory at once."""

    forward_us: float
    input_us: float
    weight_us: float
    most_inflight: int

    @property
    def total_us(self) -> float:
        return self.forward_us + self.input_us + self.weight_us


def zero_bubble_idle_us(stages: Sequence[StageTimes], num_microbatches: int, message_us: float = 0.0) -> float:
    """The time of an iteration in which the slowest stage has nothing to do, by a zero-bubble schedule that fits in memory.

    Where not even the micro-batches of 1F1B fit, there is none, and the idle time is that of 1F1B. A message from a stage to the
    next takes `message_us`.
    """
    slowest = max(stages, key=lambda stage: stage.total_us)
    most = min(_first_stage_inflight(stages), num_microbatches)
    messages_us = 2 * (len(stages) - 1) * message_us
    one_f_one_b_us = sum(stage.total_us for stage in stages) - slowest.total_us + messages_us
    if most < min(len(stages), num_microbatches):
        return one_f_one_b_us
    others_us = sum(stage.forward_us + stage.input_us for stage in stages) - slowest.forward_us - slowest.input_us
    return min(one_f_one_b_us, max(0.0, others_us + messages_us - (most - 1) * slowest.weight_us))


def _first_stage_inflight(stages: Sequence[StageTimes]) -> float:
    """The micro-batches in flight that the first stage may have, so that all stages have room for theirs.

    Beyond the S - s of 1F1B, stage s holds so much less than the first as it is nearer to the last, as in ZB-H2.
    """
    num_stages = len(stages)
    if stages[-1].most_inflight < 1:
        return 0.0
    spare = [
        (stage.most_inflight - (num_stages - number)) * (num_stages - 1) / (num_stages - 1 - number)
        for number, stage in enumerate(stages[:-1])
    ]
    return num_stages + min(spare, default=stages[-1].most_inflight - 1)
