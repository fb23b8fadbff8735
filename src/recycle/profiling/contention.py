"""Fit of contention: how much longer an op takes while other workers of the same machine compute.

The fit has one level for each number of others. Levels need not rise evenly: a machine may bear eight of twelve workers at no
cost, and slow down with the rest. They never fall.

Levels and costs are found alternately: the cost of an op is the median of its durations, each divided by the mean level while it
ran; levels are the least-squares fit of the durations divided by the costs. An op that took far longer was delayed by something
else, and counts only as far as levels could explain it.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from recycle.core.op import Kind

OpType = tuple[int, Kind]
"""A stage and a kind of op."""
_NUM_ALTERNATIONS, _NUM_SWEEPS = 20, 20
_FAR = 0.15


class Concurrency:
    """The number of workers that compute, over time, from the spans of all of them."""

    def __init__(self, spans_us: Sequence[tuple[int, int]]) -> None:
        changes = sorted([*((start, 1) for start, _ in spans_us), *((end, -1) for _, end in spans_us)])
        self._times = [at_us for at_us, _ in changes]
        self._nums = list(accumulate(change for _, change in changes))

    def shares(self, start_us: int, end_us: int, most: int) -> list[float]:
        """The shares of an op's time, `start_us` to `end_us`, in which no other, one other, up to `most` others computed."""
        shares = [0.0] * (most + 1)
        if end_us <= start_us:
            shares[0] = 1.0
            return shares
        index, at_us = bisect_right(self._times, start_us) - 1, start_us
        while at_us < end_us:
            until_us = min(end_us, self._times[index + 1])
            shares[self._nums[index] - 1] += (until_us - at_us) / (end_us - start_us)
            index, at_us = index + 1, until_us
        return shares


class TimedOp(NamedTuple):
    """The duration of an op, and the shares of it in which no other, one other, two others and so on computed."""

    type: OpType
    took_us: int
    shares: Sequence[float]


def costs_and_levels(ops: Sequence[TimedOp], usual: Sequence[TimedOp]) -> tuple[dict[OpType, float], list[float]]:
    """The cost of each type of op under the usual contention, and its duration over that by the number of others."""
    shares = torch.tensor([op.shares for op in ops], dtype=torch.float64)
    took = torch.tensor([op.took_us for op in ops], dtype=torch.float64)
    mean = torch.tensor([op.shares for op in usual], dtype=torch.float64).mean(dim=0)
    indices: defaultdict[OpType, list[int]] = defaultdict(list)
    for index, op in enumerate(ops):
        indices[op.type].append(index)
    num = shares.shape[1]
    # Levels are the sums of their rises: column j is the share of the time with at least j others.
    at_least = shares.flip(1).cumsum(1).flip(1)
    squares = at_least.T @ at_least
    rises = torch.zeros(num, dtype=torch.float64)
    levels = torch.ones(num, dtype=torch.float64)
    costs = dict[OpType, float]()
    for _ in range(_NUM_ALTERNATIONS):
        slowdown = shares @ levels
        over = torch.empty_like(took)
        for op_type, own in indices.items():
            costs[op_type] = median((took[own] / slowdown[own]).tolist())
            over[own] = took[own] / costs[op_type]
        over = over.clamp(slowdown * (1 - _FAR), slowdown * (1 + _FAR))
        rises = _rises(squares, at_least.T @ over, rises)
        levels = rises.cumsum(0)
        levels = levels / (mean @ levels)
    return {op_type: median((took[own] / (shares @ levels)[own]).tolist()) for op_type, own in indices.items()}, levels.tolist()


def _rises(squares: Tensor, wanted: Tensor, rises: Tensor) -> Tensor:
    """The least-squares solution of `squares` @ rises = `wanted` with no negative rise, by coordinate descent."""
    for _ in range(_NUM_SWEEPS):
        for index in range(len(rises)):
            own = squares[index, index]
            if own > 0:
                rises[index] = max(0.0, float(rises[index] + (wanted[index] - squares[index] @ rises) / own))
    return rises
