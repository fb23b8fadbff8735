"""Accounting of lost work: the ops and the time that must be redone after each recovery.

Two kinds of work are lost: ops of the iteration in flight, which workers report when they stop, and complete steps, if all
members go back to a checkpoint. When all pause for a member that joins or leaves, nothing is in flight.
"""

from dataclasses import dataclass

from recycle.core.events.op_columns import OpColumns


@dataclass(frozen=True, slots=True)
class LostOps:
    """The ops that are redone after a recovery, and their time; `num_in_flight` of the ops belong to no complete step."""

    num_ops: int
    time_us: int
    num_in_flight: int


@dataclass(frozen=True, slots=True)
class _Step:
    took_us: int
    num_ops: int


class LostWork:
    """Counts steps and undone ops until a recovery settles them. All times are those of the record."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._rolled_back: list[_Step] = []
        self._undone: list[OpColumns] = []

    def stepped(self, iteration: int, took_us: int, num_ops: int) -> None:
        self._steps[iteration] = _Step(took_us, num_ops)

    def undone(self, ran: OpColumns) -> None:
        """Count what a worker ran of an iteration that was undone; ops that had been in vain before do not count."""
        if ran.num_ops:
            self._undone.append(ran)

    def go_back(self, iteration: int) -> None:
        """Count the steps from `iteration` on as lost: all resume there."""
        for number in [number for number in self._steps if number >= iteration]:
            self._rolled_back.append(self._steps.pop(number))

    def forget(self) -> None:
        """Drop the counts, because a recovery in the record has them."""
        self._undone, self._rolled_back = [], []

    @property
    def first_us(self) -> int | None:
        """The start of the first undone op; None if there is none."""
        return min((ran.first_op_us for ran in self._undone), default=None)

    @property
    def last_us(self) -> int:
        """The end of the last undone op."""
        return max((ran.last_op_us for ran in self._undone), default=0)

    def settle(self, at_us: int, end_us: int, stepped_us: int, resumed_us: int) -> LostOps:
        """Return, once, the work lost by a failure or pause at `at_us`; ops that began after `end_us` belong to the next epoch.

        The last step ended at `stepped_us`. With a staggered optimizer, ops of the next step ran before that, and count from
        their start, unless the last step is redone itself; but nothing counts before the start of the epoch at `resumed_us`.
        """
        lost = [ran for ran in self._undone if ran.first_op_us < end_us]
        self._undone = [ran for ran in self._undone if ran.first_op_us >= end_us]
        steps, self._rolled_back = self._rolled_back, []
        begun_us = stepped_us if steps else min([stepped_us, *(ran.first_op_us for ran in lost)])
        time_us = sum(step.took_us for step in steps) + max(0, at_us - max(begun_us, resumed_us))
        num_in_flight = sum(ran.num_ops for ran in lost)
        return LostOps(num_in_flight + sum(step.num_ops for step in steps), time_us, num_in_flight)
