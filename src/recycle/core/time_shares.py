"""`TimeShares`: the time of a worker by its use, in a plan, a replay or a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from recycle.core.cluster import Worker


@dataclass(frozen=True, slots=True)
class TimeShares:
    """The time of one worker by its use; the rest is bubble."""

    worker: Worker
    span_us: int
    busy_us: int
    reduce_us: int
    optimizer_us: int
    in_vain_us: int = 0

    @property
    def bubble_us(self) -> int:
        return self.span_us - self.busy_us - self.reduce_us - self.optimizer_us - self.in_vain_us

    @property
    def bubble(self) -> float:
        return self.bubble_us / self.span_us


def bubble_share(shares: Sequence[TimeShares]) -> float:
    """The bubble of these workers as a share of their time."""
    return sum(share.bubble_us for share in shares) / sum(share.span_us for share in shares)
