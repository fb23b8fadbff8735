"""GradientReduction: the sum of a stage's gradient over peers, bucket by bucket, beside the last backward pass."""

from functools import partial

from torch import Tensor

from recycle.runtime.compute.buckets import make_buckets, play_last
from recycle.runtime.compute.gradients import Sums
from recycle.runtime.compute.stage import Play
from recycle.runtime.transport.reducer import Reducer, Reduction


class GradientReduction:
    """The reductions of one worker in one epoch, one for each iteration."""

    def __init__(self, sums: Sums, reducer: Reducer) -> None:
        self._buckets, self._reducer = make_buckets(sums), reducer
        self._begun: list[Reduction] = []

    @property
    def play_last(self) -> Play | None:
        """Plays the last tape of an iteration, and begins to sum each bucket that is complete; None if there is only one."""
        if len(self._buckets) == 1:
            return None
        return partial(play_last, buckets=self._buckets, on_complete=self._begin)

    def _begin(self, part: Tensor) -> None:
        self._begun.append(self._reducer.begin(part))

    def finish(self) -> None:
        """Begin what is left, which is all of it for a worker that has played no tape, and wait for the sums."""
        for bucket in self._buckets[len(self._begun) :]:
            self._begin(bucket.part)
        for reduction in self._begun:
            self._reducer.wait(reduction)
        self._begun.clear()
