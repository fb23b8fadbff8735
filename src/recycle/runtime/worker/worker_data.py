"""`WorkerData`: how a worker process reads its micro-batches: by itself, or ahead by loader processes. It outlives an epoch."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from recycle.core.cluster import Worker
from recycle.core.errors import FileProblem
from recycle.core.op import Kind
from recycle.runtime.data.read_ahead import DirectReader, MicroBatchReader, ReadAhead
from recycle.runtime.data.stream_batches import StreamBatches, positions_from_json, positions_to_json
from recycle.runtime.execute.row_program import Instruction
from recycle.runtime.transport.specs import GroupView, TransportBroken
from recycle.runtime.worker.control_thread import ControlThread
from recycle.runtime.worker.worker_reports import WorkerWarned
from recycle.runtime.worker.worker_spec import WorkerSpec


class WorkerData:
    """The data of one worker. `waited_us` is how long its ops have waited for data in all, of `trained_us` in epochs.

    `set_device` selects the worker's device in the calling thread.
    """

    def __init__(self, spec: WorkerSpec, control: ControlThread, set_device: Callable[[], torch.device]) -> None:
        self._spec, self._control, self._set_device = spec, control, set_device
        self._reader: MicroBatchReader | None = None
        self._began_s = 0.0
        self.waited_us = self.trained_us = 0

    @property
    def reads_streams(self) -> bool:
        """Whether positions in streams must be exchanged before it begins to read."""
        return isinstance(self._spec.microbatches, StreamBatches)

    def reader(self) -> MicroBatchReader:
        """What reads the micro-batches of the present row."""
        assert self._reader is not None
        return self._reader

    def exchange_positions(self, store: Any, view: GroupView) -> None:
        """Tell all workers of an epoch that read streams how far this one has come in them, and learn that from them.

        Who takes over a micro-batch then begins where its reader was. All of them must call this.
        """
        source, last_stage = self._spec.microbatches, self._spec.shape.num_stages - 1
        if not isinstance(source, StreamBatches) or view.worker.stage not in (0, last_stage):
            return
        store.set(f"positions/{view.worker}", json.dumps(positions_to_json(source.known_positions())))
        readers = [other for other in view.others if other.stage in (0, last_stage)]
        for other in readers:
            with suppress(FileProblem):  # a position is a hint
                source.keep_positions(positions_from_json(store.get(f"positions/{other}")))

    def begin(self, place: Worker, instructions: Sequence[Instruction], iteration: int) -> MicroBatchReader:
        """Begin to read the micro-batches of a row, from an iteration on."""
        self.end()
        options, last_stage = self._spec.options, self._spec.shape.num_stages - 1
        places = [(each.microbatch.pipeline, each.microbatch.index) for each in instructions if each.kind is Kind.F]
        if place.stage in (0, last_stage) and iteration < self._spec.num_steps:
            self._warn_of_skipped(place, places, iteration)
        takes = place.stage == 0, place.stage == last_stage
        is_read_ahead = options.data.loader_processes > 0 and place.stage in (0, last_stage) and places
        if is_read_ahead and iteration < self._spec.num_steps:
            self._reader = ReadAhead(
                self._spec.microbatches,
                options.data,
                places,
                range(iteration, self._spec.num_steps),
                takes,
                pin_to=self._set_device if options.device == "cuda" else None,
                on_wait=self._on_wait,
            )
        else:
            self._reader = DirectReader(self._spec.microbatches, takes)
        self._began_s = time.monotonic()
        return self._reader

    def _warn_of_skipped(self, place: Worker, places: Sequence[tuple[int, int]], iteration: int) -> None:
        source = self._spec.microbatches
        again = source.num_again(iteration, places) if isinstance(source, StreamBatches) else 0
        if again:
            text = (
                f"{again} samples of the stream are read again to get to step {iteration + 1}, because it has no state that leads"
            )
            self._control.report(WorkerWarned(place, f"{text} there: give the dataset state_dict and load_state_dict"))

    def end(self) -> None:
        """Stop reading, and end the loader processes."""
        if self._reader is not None:
            self._reader.close()
            self.waited_us += self._reader.waited_us
            self.trained_us += round((time.monotonic() - self._began_s) * 1e6)
            self._reader = None

    def _on_wait(self, has_moved: bool) -> None:
        if has_moved:
            self._control.activity.renew()
        if self._control.is_over:
            raise TransportBroken("the epoch was over while data were waited for")
