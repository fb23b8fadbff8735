"""GradientReduction: sums of a stage's gradient over peers, bucket by bucket beside the last backward pass, and over its ties."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from recycle.runtime.compute.buckets import make_buckets, play_last
from recycle.runtime.compute.stage import Play, Stage
from recycle.runtime.compute.tied_parameters import Tie, gather, scatter
from recycle.runtime.transport.reducer import Reducer, Reduction


class GradientReduction:
    """The reductions of one worker in one epoch, one for each iteration.

    The parameters of a tie are summed over the peers of the stage, and then the first peers' sums over all stages of the tie. An
    elastic stage has most of its parameters in ties: they are in no bucket, and are summed over all workers of the tie at once.
    """

    def __init__(self, stage: Stage, ties: Sequence[Tie], reducer: Reducer, is_first_peer: bool) -> None:
        self._sums, self._reducer, self._is_first_peer, self._is_elastic = stage.sums, reducer, is_first_peer, stage.is_elastic
        self._ties = [(tie, tie.parameters(stage.number, stage.module)) for tie in ties if stage.number in tie.stages]
        apart = {id(parameter) for _, tied in self._ties for parameter in tied} if stage.is_elastic else frozenset[int]()
        self._buckets = make_buckets(stage.sums, apart=apart)
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
        # Gathered before the last bucket is begun, which has the marks of all parameters.
        ties = [(tie, tied, gather(self._sums, tied)) for tie, tied in self._ties] if self._is_elastic else []
        for bucket in self._buckets[len(self._begun) :]:
            self._begin(bucket.part)
        for reduction in [*self._begun, *[self._reducer.begin(gathered, tie) for tie, _, gathered in ties]]:
            self._reducer.wait(reduction)
        self._begun.clear()
        for _, tied, gathered in ties:
            scatter(gathered, self._sums, tied)
        if not self._is_elastic:
            self._add_ties()

    def _add_ties(self) -> None:
        """Sum over the stages of each tie what the peers of this stage have summed."""
        for tie, tied in self._ties:
            gathered = gather(self._sums, tied)
            if not self._is_first_peer:
                gathered.zero_()  # all peers hold the sum of the stage: it counts once
            self._reducer.all_reduce(gathered, tie)
            scatter(gathered, self._sums, tied)
