"""Work that is done again: what of it the books have heard since the last recovery, and what it comes to.

Two things are thrown away: ops of the iteration in flight, which workers tell of when they are stopped, and whole steps, if all
go back to a checkpoint. When all pause for somebody who joins, no step is in flight; but with a staggered optimizer the warm-up
of the next one has been played by then, and is thrown away, too.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from recycle.runtime.execute.spans import Span


@dataclass(frozen=True, slots=True)
class LostOps:
    """What is done again after a recovery: `num_ops` ops that took `time_us`; `num_in_flight` of them were of no whole step."""

    num_ops: int
    time_us: int
    num_in_flight: int


@dataclass(frozen=True, slots=True)
class _Step:
    took_us: int
    num_ops: int


class LostWork:
    """Takes in steps and what becomes of them. All times are those of the record."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._rolled_back: list[_Step] = []
        self._undone: list[Span] = []

    def stepped(self, iteration: int, took_us: int, num_ops: int) -> None:
        self._steps[iteration] = _Step(took_us, num_ops)

    def undone(self, spans: Iterable[Span]) -> None:
        """Ops of an iteration were thrown away; those that had been in vain before are no part of that."""
        self._undone += [span for span in spans if span.is_op and not span.is_discarded]

    def go_back(self, iteration: int) -> None:
        """All go on at `iteration`: the steps from there on are done again."""
        for number in [number for number in self._steps if number >= iteration]:
            self._rolled_back.append(self._steps.pop(number))

    def forget(self) -> None:
        """What is to be done again by now has been told."""
        self._undone, self._rolled_back = [], []

    @property
    def first_us(self) -> int | None:
        """When the first op that was undone began; None if there is none."""
        return min((span.start_us for span in self._undone), default=None)

    @property
    def last_us(self) -> int:
        """When the last op that was undone ended."""
        return max((span.end_us for span in self._undone), default=0)

    def settle(self, at_us: int, end_us: int, stepped_us: int, resumed_us: int) -> LostOps:
        """Say what is done again because of what happened at `at_us`, once; ops that began after `end_us` are of another epoch.

        The last step ended at `stepped_us`. With a staggered optimizer ops of the next one ran before that, and count from when
        they began, unless that step is done again itself; but nothing is older than the epoch, which began at `resumed_us`.
        """
        mine = [span for span in self._undone if span.start_us < end_us]
        self._undone = [span for span in self._undone if span.start_us >= end_us]
        steps, self._rolled_back = self._rolled_back, []
        begun_us = stepped_us if steps else min([stepped_us, *(span.start_us for span in mine)])
        time_us = sum(step.took_us for step in steps) + max(0, at_us - max(begun_us, resumed_us))
        return LostOps(len(mine) + sum(step.num_ops for step in steps), time_us, len(mine))
