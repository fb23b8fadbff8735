"""How workers of one machine hold each other up, read from who computed when.

While others compute, an op takes longer: they want the same memory, power and caches. By how much is a level for each number of
others. It need not rise evenly: a machine may bear eight of twelve at no cost at all, and pay for the rest. It never falls.

Levels and costs are found in turns: the cost of an op is the median of what it took, each over the levels while it ran; levels
are those for which costs come nearest to what ops took, by least squares. Ops that took far longer than that were held up by
something else, and count only as far as levels could explain them.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from recycle.core.op import Kind

What = tuple[int, Kind]
"""A stage and a kind of op."""
_NUM_TURNS, _NUM_SWEEPS = 20, 20
_FAR = 0.15


class Contenders:
    """How many workers computed when, from the spans of all of them."""

    def __init__(self, spans_us: Sequence[tuple[int, int]]) -> None:
        changes = sorted([*((start, 1) for start, _ in spans_us), *((end, -1) for _, end in spans_us)])
        self._times, self._nums = list[int](), list[int]()
        num = 0
        for at_us, change in changes:
            num += change
            self._times.append(at_us)
            self._nums.append(num)

    def shares(self, start_us: int, end_us: int, most: int) -> list[float]:
        """The share of the time from `start_us` to `end_us`, while somebody computed, with no other, one other, up to `most`."""
        shares = [0.0] * (most + 1)
        if end_us <= start_us:
            shares[0] = 1.0
            return shares
        place, at_us = bisect_right(self._times, start_us) - 1, start_us
        while at_us < end_us:
            until_us = min(end_us, self._times[place + 1])
            shares[self._nums[place] - 1] += (until_us - at_us) / (end_us - start_us)
            place, at_us = place + 1, until_us
        return shares


class Timed(NamedTuple):
    """What an op took, and for which shares of that how many others computed."""

    what: What
    took_us: int
    shares: Sequence[float]


def costs_and_levels(ops: Sequence[Timed], usual: Sequence[Timed]) -> tuple[dict[What, float], list[float]]:
    """What each kind of op costs in the crowd that is usual, and what it takes over that by the number of others."""
    shares = torch.tensor([op.shares for op in ops], dtype=torch.float64)
    took = torch.tensor([op.took_us for op in ops], dtype=torch.float64)
    mean = torch.tensor([op.shares for op in usual], dtype=torch.float64).mean(dim=0)
    places: defaultdict[What, list[int]] = defaultdict(list)
    for place, op in enumerate(ops):
        places[op.what].append(place)
    num = shares.shape[1]
    # Levels are the sums of their rises: column j is the share of the time with at least j others.
    at_least = shares.flip(1).cumsum(1).flip(1)
    squares = at_least.T @ at_least
    rises = torch.zeros(num, dtype=torch.float64)
    levels = torch.ones(num, dtype=torch.float64)
    costs = dict[What, float]()
    for _ in range(_NUM_TURNS):
        held_up = shares @ levels
        over = torch.empty_like(took)
        for what, own in places.items():
            costs[what] = median((took[own] / held_up[own]).tolist())
            over[own] = took[own] / costs[what]
        over = over.clamp(held_up * (1 - _FAR), held_up * (1 + _FAR))
        rises = _rises(squares, at_least.T @ over, rises)
        levels = rises.cumsum(0)
        levels = levels / (mean @ levels)
    return {what: median((took[own] / (shares @ levels)[own]).tolist()) for what, own in places.items()}, levels.tolist()


def _rises(squares: Tensor, wanted: Tensor, rises: Tensor) -> Tensor:
    """The least squares of `squares` @ rises = `wanted` among rises that are not negative, coordinate by coordinate."""
    for _ in range(_NUM_SWEEPS):
        for place in range(len(rises)):
            own = squares[place, place]
            if own > 0:
                rises[place] = max(0.0, float(rises[place] + (wanted[place] - squares[place] @ rises) / own))
    return rises
