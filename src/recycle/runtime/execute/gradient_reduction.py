"""GradientReduction: sums of a stage's gradient over peers, bucket by bucket beside the last backward pass, and over its ties."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from recycle.runtime.compute.buckets import make_buckets, play_last
from recycle.runtime.compute.elastic_stage import ElasticStage
from recycle.runtime.compute.stage import Play, Stage
from recycle.runtime.compute.tied_parameters import Tie, gather, scatter
from recycle.runtime.execute.row_program import Instruction
from recycle.runtime.execute.tied_parts import TiedPart, tied_parts
from recycle.runtime.transport.reducer import Reducer, Reduction


class GradientReduction:
    """The reductions of one worker in one epoch, one for each iteration.

    The parameters of a tie are summed over the peers of the stage, and then the first peers' sums over all stages of the tie. An
    elastic stage has most of its parameters in ties: they are in no bucket, and are summed over all workers of the tie at once,
    in parts by home. Parts of earlier homes begin while the row is played, and those of later homes end after its end.
    """

    def __init__(
        self,
        stage: Stage,
        ties: Sequence[Tie],
        reducer: Reducer,
        is_first_peer: bool,
        instructions: Sequence[Instruction],
        warm_up: int,
    ) -> None:
        self._sums, self._reducer, self._is_first_peer = stage.sums, reducer, is_first_peer
        self._warm_up, self._last = warm_up, len(instructions) - 1
        self._ties = [(tie, tie.parameters(stage.number, stage.module)) for tie in ties if stage.number in tie.stages]
        parts = tied_parts(stage, ties, instructions) if stage.is_elastic else []
        later = [part for part in parts if part.home > stage.number]
        self.num_early = self._num_before(later)
        self._late = later if self.num_early < len(stage.sums.parameters) else []
        self._early = [part for part in parts if part.home < stage.number]
        self._own = parts[len(self._early) : len(parts) - len(self._late)]
        self._is_elastic = stage.is_elastic
        self._own_end = stage.module.own_layers.stop if isinstance(stage.module, ElasticStage) else 0
        apart = {id(parameter) for part in parts for parameter in part.parameters}
        self._buckets = make_buckets(stage.sums, apart=apart)
        self._begun: list[Reduction] = []
        self._begun_parts: list[tuple[TiedPart, Reduction]] = []

    def _num_before(self, late: Sequence[TiedPart]) -> int:
        """How many parameters are stepped before the late parts; all if these have own layers or are not the last parameters."""
        ids = {id(parameter) for part in late for parameter in part.parameters}
        everything = self._sums.parameters
        num = len(everything) - len(ids)
        can_be_late = all(part.has_guests_only for part in late) and ids == {id(each) for each in everything[num:]}
        return num if can_be_late else len(everything)

    @property
    def play_last(self) -> Play | None:
        """Plays the last tape of an iteration, and begins to sum each bucket that is complete; None if there is only one.

        Buckets come after the parts of earlier homes, as on all peers: these must be complete before the last op.
        """
        begun_at = [max(part.complete_at, self._warm_up) for part in self._early]  # `after` begins nothing in the warm-up
        if len(self._buckets) == 1 or any(index >= self._last for index in begun_at):
            return None
        return partial(play_last, buckets=self._buckets, on_complete=self._begin)

    def after(self, index: int) -> None:
        """Begin the parts of earlier homes that are complete, now that the op of this index has run."""
        if index >= self._warm_up:  # before, the sums are still those of the iteration before
            for part in self._early[len(self._begun_parts) :]:
                if part.complete_at > index:
                    break
                self._begin_part(part, gather(self._sums, part.parameters))

    def _begin(self, part: Tensor) -> None:
        self._begun.append(self._reducer.begin(part))

    def _begin_part(self, part: TiedPart, gathered: Tensor) -> None:
        self._begun_parts.append((part, self._reducer.begin(gathered, part.tie)))

    def finish(self) -> None:
        """Begin what is left, which is all of it for a worker that has played no tape, and wait for all but the late sums."""
        for part in self._early[len(self._begun_parts) :]:
            self._begin_part(part, gather(self._sums, part.parameters))
        # Gathered before the last bucket is begun, which has the marks of all parameters.
        gathered = [(part, gather(self._sums, part.parameters)) for part in (*self._own, *self._late)]
        for bucket in self._buckets[len(self._begun) :]:
            self._begin(bucket.part)
        for own in gathered:
            self._begin_part(*own)
        for reduction in self._begun:
            self._reducer.wait(reduction)
        self._begun.clear()
        for part in (*self._early, *self._own):
            self._take(part)
        if not self._is_elastic:
            self._add_ties()

    @property
    def has_late(self) -> bool:
        """Whether there are sums that end later: those of guests of a stage whose rows end later."""
        return bool(self._begun_parts)

    @property
    def is_late_done(self) -> bool:
        return all(reduction.is_done for _, reduction in self._begun_parts)

    def uses_late(self, instruction: Instruction) -> bool:
        """Whether an instruction computes a layer whose sum is a late one."""
        return instruction.layers is not None and instruction.layers.stop > self._own_end

    def finish_late(self) -> None:
        """Wait for the late sums."""
        for part in self._late:
            self._take(part)

    def _take(self, expected: TiedPart) -> None:
        """Wait for the sum that was begun first, and write it back."""
        part, reduction = self._begun_parts.pop(0)
        assert part is expected
        self._reducer.wait(reduction)
        scatter(reduction.tensor, self._sums, part.parameters)

    def _add_ties(self) -> None:
        """Sum over the stages of each tie what the peers of this stage have summed."""
        for tie, tied in self._ties:
            gathered = gather(self._sums, tied)
            if not self._is_first_peer:
                gathered.zero_()  # all peers hold the sum of the stage: it counts once
            self._reducer.all_reduce(gathered, tie)
            scatter(gathered, self._sums, tied)
