"""GradientReduction: sums of a stage's gradient over peers, bucket by bucket beside the last backward pass, and over its ties."""

from collections import deque
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from recycle.runtime.compute.elastic_stage import ElasticStage
from recycle.runtime.compute.stage import Play, Stage
from recycle.runtime.compute.streams import beside_ops
from recycle.runtime.compute.tied_parameters import Tie, gather, scatter
from recycle.runtime.execute.buckets import make_buckets, play_last
from recycle.runtime.execute.row_program import Instruction
from recycle.runtime.execute.tied_parts import TiedPart, tied_parts
from recycle.runtime.transport.reducer import Reducer, Reduction


class GradientReduction:
    """The reductions of one worker in one epoch, one for each iteration.

    The parameters of a tie are summed over the peers of the stage, and then the first peers' sums over all stages of the tie. An
    elastic stage has most of its parameters in ties: they are in no bucket, and are summed over all workers of the tie at once,
    in parts. Some parts come before the buckets, and begin while the row is played. The sums of the others may end later: these
    are *late*, and only what uses them waits for them. A sum that was waited for is there, on a GPU, too.
    """

    def __init__(
        self,
        stage: Stage,
        ties: Sequence[Tie],
        reducer: Reducer,
        is_first_peer: bool,
        instructions: Sequence[Instruction],
        warm_up: int,
        sum_order: Sequence[Sequence[int]] = (),
    ) -> None:
        self._sums, self._reducer, self._is_first_peer = stage.sums, reducer, is_first_peer
        self._warm_up, self._last = warm_up, len(instructions) - 1
        self._ties = [(tie, tie.parameters(stage.number, stage.module)) for tie in ties if stage.number in tie.stages]
        self._early, self._rest = tied_parts(stage, ties, instructions, sum_order) if stage.is_elastic else ([], [])
        # Nobody knows which op needs a part without layers: it is awaited, and so are those before it.
        self._num_awaited = max((number for number, part in enumerate(self._rest, 1) if part.layers is None), default=0)
        self._is_elastic = stage.is_elastic
        self._own_layers = stage.module.own_layers if isinstance(stage.module, ElasticStage) else range(0)
        apart = {id(parameter) for part in (*self._early, *self._rest) for parameter in part.parameters}
        self._buckets = make_buckets(stage.sums, apart=apart)
        self._begun: list[Reduction] = []
        self._begun_parts: deque[tuple[TiedPart, Reduction]] = deque()

    @property
    def play_last(self) -> Play | None:
        """Plays the last tape of an iteration, and begins to sum each bucket that is complete; None if there is only one.

        Buckets come after the first parts, as on all peers: these must be complete before the last op.
        """
        begun_at = [max(part.complete_at, self._warm_up) for part in self._early]  # `after` begins nothing in the warm-up
        if len(self._buckets) == 1 or any(index >= self._last for index in begun_at):
            return None
        return partial(play_last, buckets=self._buckets, on_complete=self._begin)

    def after(self, index: int) -> None:
        """Begin the parts before the buckets that are complete, now that the op of this index has run."""
        if index >= self._warm_up:  # before, the sums are still those of the iteration before
            for part in self._early[len(self._begun_parts) :]:
                if part.complete_at > index:
                    break
                self._begin_part(part, gather(self._sums, part.parameters))

    def _begin(self, part: Tensor) -> None:
        self._begun.append(self._reducer.begin(part))

    def _begin_part(self, part: TiedPart, gathered: Tensor) -> None:
        self._begun_parts.append((part, self._reducer.begin(gathered, part.tie)))

    def finish(self, more: Tensor | None = None) -> None:
        """Begin what is left, which is all of it for a worker that has played no tape, and wait for all but the late sums.

        `more` is summed over the peers, too, before what may be late.
        """
        for part in self._early[len(self._begun_parts) :]:
            self._begin_part(part, gather(self._sums, part.parameters))
        # Gathered before the last bucket is begun, which has the marks of all parameters.
        gathered = [(part, gather(self._sums, part.parameters)) for part in self._rest]
        for bucket in self._buckets[len(self._begun) :]:
            self._begin(bucket.part)
        if more is not None:
            self._begin(more)
        for own in gathered:
            self._begin_part(*own)
        for reduction in self._begun:
            self._reducer.wait(reduction)
        self._begun.clear()
        for _ in range(len(self._early) + self._num_awaited):
            self.finish_next()
        if not self._is_elastic:
            self._add_ties()

    @property
    def num_late(self) -> int:
        """How many late sums are still to be taken."""
        return len(self._begun_parts)

    @property
    def num_ready(self) -> int:
        """How many of the late sums can be taken without waiting, in their order; raise if a sum has failed."""
        self._reducer.refuse_broken()
        return next((number for number, (_, reduction) in enumerate(self._begun_parts) if not reduction.is_done), self.num_late)

    def late_parameters(self) -> Sequence[Tensor]:
        """The parameters whose sums are late, in the order of their sums."""
        return [parameter for part, _ in self._begun_parts for parameter in part.parameters]

    def num_due(self, instruction: Instruction) -> int:
        """How many of the late sums must be taken, or can be without waiting, before an instruction."""
        used = self._own_layers if instruction.layers is None else instruction.layers
        due = 0
        for number, (part, _) in enumerate(self._begun_parts, 1):
            assert part.layers is not None, "an awaited part is not late"
            if not part.layers.isdisjoint(used):
                due = number
        return max(due, self.num_ready)

    def finish_next(self) -> Sequence[Tensor]:
        """Wait for the sum that was begun first, write it back, and return its parameters."""
        part, reduction = self._begun_parts.popleft()
        self._reducer.wait(reduction)
        self._write_back(reduction.tensor, part.parameters)
        return part.parameters

    def _write_back(self, summed: Tensor, parameters: Sequence[Tensor]) -> None:
        with beside_ops(summed.device):
            scatter(summed, self._sums, parameters)

    def _add_ties(self) -> None:
        """Sum over the stages of each tie what the peers of this stage have summed."""
        for tie, tied in self._ties:
            gathered = gather(self._sums, tied)
            if not self._is_first_peer:
                gathered.zero_()  # all peers hold the sum of the stage: it counts once
            self._reducer.all_reduce(gathered, tie)
            self._write_back(gathered, tied)
