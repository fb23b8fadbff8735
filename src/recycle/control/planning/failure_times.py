"""`FailureTimes`: the mean time between failures that a run has seen."""

_FEWEST = 2


class FailureTimes:
    """Counts failures since `begin_us`. The mean is known when there were two: one says nothing about the next one."""

    def __init__(self, begin_us: int) -> None:
        self._begin_us, self._last_us, self._num = begin_us, begin_us, 0

    def add(self, at_us: int, num: int) -> None:
        """Note that `num` workers failed at a time."""
        if num:
            self._num, self._last_us = self._num + num, max(self._last_us, at_us)

    @property
    def mean_us(self) -> int | None:
        """The time from the beginning to the last failure over their number, to two digits; None if there were too few.

        Plans made ahead are for this number, so it changes only with failures, and not by a little.
        """
        if self._num < _FEWEST:
            return None
        return max(1, int(float(f"{(self._last_us - self._begin_us) / self._num:.1e}")))
