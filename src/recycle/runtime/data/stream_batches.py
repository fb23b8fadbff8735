"""`StreamBatches`: the micro-batches of a stream by address, though a stream can only be read in order.

A stream is divided into parts, if it can be, which the micro-batches of a step share out: each part has the same ones in every
step. So whoever reads a micro-batch reads one part only, up to the step. The positions that readers have reached are kept, and
others can begin there.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recycle.core.cluster import Shape
from recycle.core.errors import FileProblem
from recycle.runtime.compute.microbatches import JoinedMicroBatches, JoinSamples, StackedSamples
from recycle.runtime.data.data_options import refuse_count
from recycle.runtime.data.streams import SampleStream, StreamPosition, num_parts_of, refuse_one_way

# Positions of so many last steps are kept of each part: a step may be taken back, and a worker be a step behind.
_KEPT_STEPS = 4
Positions = Mapping[int, Mapping[int, str]]
"""Positions as text, by part and by the number of micro-batches that were taken from it."""


def _nothing() -> None:
    pass


class StreamBatches(JoinedMicroBatches):
    """Micro-batches of `microbatch` samples of a stream. `on_sample` is called with every sample that is read."""

    def __init__(
        self,
        dataset: Any,
        shape: Shape,
        microbatch: int,
        seed: int,
        repeats: bool = False,
        join: JoinSamples | None = None,
    ) -> None:
        super().__init__(join)
        refuse_count("the number of samples of a micro-batch", microbatch, 1)
        refuse_one_way(dataset)
        self._dataset, self._shape, self._microbatch, self._seed, self._repeats = dataset, shape, microbatch, seed, repeats
        self.num_parts = num_parts_of(dataset, shape.num_chains)
        self.on_sample: Callable[[], None] = _nothing
        self._open: dict[int, SampleStream] = {}
        self._known: dict[int, dict[int, str]] = {}

    def __repr__(self) -> str:
        fingerprint = getattr(self._dataset, "fingerprint", "")
        known = f" ({fingerprint})" if isinstance(fingerprint, str) and fingerprint else ""
        how = "" if isinstance(self._join, StackedSamples) else f", {self._join!r}"
        how += ", again and again" if self._repeats else ""
        return f"micro-batches of {self._microbatch} out of a stream in {self.num_parts} parts{known}, seed {self._seed}{how}"

    def __getstate__(self) -> dict[str, Any]:
        """All but the iterators, which belong to a process."""
        return {**self.__dict__, "_open": {}, "on_sample": _nothing}

    def _samples(self, step: int, pipeline: int, index: int) -> tuple[list[Any], list[int]]:
        part, wanted = self.part_of(pipeline, index), self._num_before(step, pipeline, index)
        stream = self._open.get(part)
        if stream is None or stream.num_microbatches > wanted:
            position = self._nearest(part, wanted)
            how = part, self.num_parts, self._seed, self._repeats
            stream = self._open[part] = SampleStream(self._dataset, *how, position, lambda: self.on_sample())
        while stream.num_microbatches < wanted:
            stream.take(self._microbatch)
        return stream.take(self._microbatch)

    def part_of(self, pipeline: int, index: int) -> int:
        """The part of the stream that has this micro-batch in every step."""
        return (pipeline * self._shape.num_microbatches + index) % self.num_parts

    @property
    def _num_in_step(self) -> int:
        """How many micro-batches of a step come from one part."""
        return self._shape.num_chains // self.num_parts

    def _num_before(self, step: int, pipeline: int, index: int) -> int:
        """How many micro-batches of its part come before this one."""
        chain = pipeline * self._shape.num_microbatches + index
        return step * self._num_in_step + chain // self.num_parts

    # Positions.

    def positions_after(self, step: int, pipeline: int, index: int) -> Positions:
        """The position after a micro-batch that was just read."""
        part = self.part_of(pipeline, index)
        stream = self._open[part]
        return {part: {stream.num_microbatches: stream.position().to_text()}}

    def keep_positions(self, positions: Positions) -> None:
        """Keep positions that a reader has reached."""
        for part, reached in positions.items():
            known = self._known.setdefault(part, {})
            known |= reached
            newest = max(known)
            for number in [number for number in known if number < newest - _KEPT_STEPS * self._num_in_step]:
                del known[number]

    def restart(self, positions: Positions) -> None:
        """Forget all positions but these, those of a checkpoint: training goes back there."""
        self._known.clear()
        self.keep_positions(positions)

    def positions_at(self, num_steps: int) -> Positions:
        """The nearest known position of each part before the step that follows `num_steps` steps."""
        end = num_steps * self._num_in_step
        nearest = {part: max((n for n in known if n <= end), default=None) for part, known in self._known.items()}
        return {part: {number: self._known[part][number]} for part, number in nearest.items() if number is not None}

    def known_positions(self) -> Positions:
        return self._known

    def num_again(self, step: int, places: Sequence[tuple[int, int]]) -> int:
        """How many samples a reader of these micro-batches reads again before a step; 0 if they are those of a few steps."""
        firsts: dict[int, int] = {}
        for place in places:
            wanted = self._num_before(step, *place)
            firsts[self.part_of(*place)] = min(wanted, firsts.get(self.part_of(*place), wanted))
        total = 0
        for part, wanted in firsts.items():
            position = self._nearest(part, wanted)
            again = (wanted - position.num_microbatches) * self._microbatch
            again += position.num_samples if position.state is None else 0
            total += again if again > _KEPT_STEPS * self._num_in_step * self._microbatch else 0
        return total

    def _nearest(self, part: int, wanted: int) -> StreamPosition:
        known = self._known.get(part, {})
        number = max((number for number in known if number <= wanted), default=None)
        return StreamPosition.parse(known[number]) if number is not None else StreamPosition()


def positions_to_json(positions: Positions) -> dict[str, dict[str, str]]:
    return {str(part): {str(number): text for number, text in reached.items()} for part, reached in positions.items()}


def positions_from_json(form: Any) -> dict[int, dict[int, str]]:
    """Positions that `positions_to_json` gave, after they were JSON; their texts are checked when they are used.

    Raises:
        FileProblem: The form is that of another release, or was changed.
    """
    try:
        read = json.loads(form) if isinstance(form, str | bytes) else form
        return {int(part): {int(number): str(text) for number, text in reached.items()} for part, reached in read.items()}
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise FileProblem("the positions in the streams of a run cannot be read: they are corrupt") from None
