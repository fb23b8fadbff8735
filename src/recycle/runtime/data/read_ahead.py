"""`ReadAhead`: loader processes that make the micro-batches of one worker in one epoch before its ops need them.

The processes and queues are those of torch's `DataLoader`. It is asked in a thread, because it cannot be woken up: the main
thread must stop waiting when the epoch ends, and must notice a process that has died or stands still.
"""

import multiprocessing
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader

from recycle.core import errors
from recycle.core.errors import DataFailed, UserError
from recycle.runtime.boundary.nests import Nest
from recycle.runtime.compute.microbatches import MicroBatchSource
from recycle.runtime.data.data_options import DataOptions
from recycle.runtime.data.loader_process import MADE, REFUSED, Address, AddressedMicroBatches

_POLL_S, _READY = 0.05, 2
OnWait = Callable[[bool], None]
"""Called again and again while a worker waits for data, with whether a sample was made since; it raises to end the wait."""


class LoaderDied(Exception):
    """A loader process of this worker has ended, and how."""


@runtime_checkable
class StreamReader(Protocol):
    """A source that reads streams. It keeps the positions in them that loader processes have reached."""

    def part_of(self, pipeline: int, index: int) -> int: ...

    def positions_after(self, step: int, pipeline: int, index: int) -> Mapping[Any, Any]: ...

    def keep_positions(self, positions: Mapping[Any, Any]) -> None: ...


def lanes_of(source: MicroBatchSource, places: Sequence[tuple[int, int]], num_processes: int) -> tuple[list[int], int]:
    """The lane of each place, and how many processes each lane has. All places of a part of a stream are in one lane."""
    if not isinstance(source, StreamReader):
        return [0] * len(places), num_processes
    parts = [source.part_of(*place) for place in places]
    order = {part: number for number, part in enumerate(dict.fromkeys(parts))}
    return [order[part] % num_processes for part in parts], 1


class MicroBatchReader(Protocol):
    """Gives a worker its micro-batches. `waited_us` is how long the worker has waited for them in all."""

    waited_us: int

    def get(self, step: int, pipeline: int, index: int) -> tuple[Nest, Nest]: ...

    def close(self) -> None: ...


class DirectReader:
    """Reads where it is asked, between the ops of the worker."""

    def __init__(self, source: MicroBatchSource) -> None:
        self._source, self.waited_us = source, 0

    def get(self, step: int, pipeline: int, index: int) -> tuple[Nest, Nest]:
        start_ns = time.monotonic_ns()
        made = self._source.get(step, pipeline, index)
        if isinstance(self._source, StreamReader):
            self._source.keep_positions(self._source.positions_after(step, pipeline, index))
        self.waited_us += (time.monotonic_ns() - start_ns) // 1000
        return made

    def close(self) -> None:
        pass


class ReadAhead:
    """Micro-batches of steps from `first` to before `stop`, at the `places` (pipeline, index) in the order of a worker's row.

    `takes` says whether inputs and targets are asked for. With `pin_to`, which selects a GPU, they come in pinned memory.
    `on_wait` is called while the worker waits.
    """

    def __init__(
        self,
        source: MicroBatchSource,
        options: DataOptions,
        places: Sequence[tuple[int, int]],
        steps: range,
        takes: tuple[bool, bool],
        pin_to: Callable[[], object] | None,
        on_wait: OnWait,
    ) -> None:
        self.waited_us = 0
        self._source, self._places, self._steps, self._options, self._on_wait = source, places, steps, options, on_wait
        self._progress = multiprocessing.get_context("fork").RawValue("q", 0)
        self._made: queue.Queue[tuple[Address, Any] | Exception] = queue.Queue(_READY)
        self._is_closed, self._has_started = False, threading.Event()
        self._children: list[Any] = []
        self._pin_to = pin_to
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # more than cores: they may wait for disks
        self._lanes, processes = lanes_of(source, places, options.loader_processes)
        self._loaders = [self._loader(lane, processes, takes) for lane in range(max(self._lanes) + 1)]
        # A daemon: it ends when it notices that its processes have ended, which may be after the worker has gone on.
        threading.Thread(target=self._read, name="reading data", daemon=True).start()
        self._has_started.wait()

    def get(self, step: int, pipeline: int, index: int) -> tuple[Nest, Nest]:
        """Return a micro-batch; they are asked for in the order of the row."""
        start_ns = time.monotonic_ns()
        address, answer = self._next((step, pipeline, index))
        assert address == (step, pipeline, index), f"{address} was made, but {(step, pipeline, index)} is asked for"
        self.waited_us += (time.monotonic_ns() - start_ns) // 1000
        match answer:
            case (made, inputs, targets, positions) if made == MADE:
                if isinstance(self._source, StreamReader):
                    self._source.keep_positions(positions)
                return inputs, targets
            case (refused, kind, text) if refused == REFUSED:
                found = getattr(errors, kind, UserError)
                raise found(text) if isinstance(found, type) and issubclass(found, UserError) else UserError(text)
        raise RuntimeError(f"in a loader process: {answer[-1]}")

    def close(self) -> None:
        """End the processes at once: what they are making is not needed."""
        self._is_closed = True
        for child in self._children:
            with suppress(ValueError, ProcessLookupError):
                child.kill()
        with suppress(queue.Empty):
            while True:
                self._made.get_nowait()

    def _next(self, wanted: Address) -> tuple[Address, Any]:
        since_s, seen = time.monotonic(), self._progress.value
        while True:
            try:
                made = self._made.get(timeout=_POLL_S)
            except queue.Empty:
                has_moved, seen = self._progress.value != seen, self._progress.value
                since_s = time.monotonic() if has_moved else since_s
                self._on_wait(has_moved)
                self._refuse_dead()
                if (waited_s := time.monotonic() - since_s) > self._options.timeout_s:
                    raise DataFailed(self._describe_stuck(wanted, waited_s)) from None
                continue
            if isinstance(made, Exception):
                self._refuse_dead()
                raise made
            return made

    def _describe_stuck(self, wanted: Address, waited_s: float) -> str:
        step, pipeline, index = wanted
        numbers = getattr(self._source, "numbers", None)
        samples = f" (samples {', '.join(map(str, numbers(*wanted)))})" if numbers is not None else ""
        return (
            f"no sample was made for {waited_s:.0f} s, and a worker waits for micro-batch {index} of pipeline {pipeline} in step "
            f"{step + 1}{samples}: mend the dataset, or allow more time with timeout_s"
        )

    def _refuse_dead(self) -> None:
        ended = wait([child.sentinel for child in self._children], 0)
        for child in self._children:
            if child.sentinel in ended:
                child.join(1.0)
                code = child.exitcode or 0
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                raise LoaderDied(f"loader process {child.pid} {how}: is the machine out of memory?")

    def _loader(self, lane: int, processes: int, takes: tuple[bool, bool]) -> DataLoader[Any]:
        dataset = AddressedMicroBatches(self._source, *takes, self._progress)
        return DataLoader(
            dataset,
            batch_size=None,
            sampler=_Addresses(self._addresses, lane),
            num_workers=processes,
            collate_fn=_as_it_is,
            pin_memory=self._pin_to is not None,
            prefetch_factor=self._options.ahead,
            worker_init_fn=dataset.prepare_process,
            # Forked: a worker's memory is shared, so that a large dataset is not copied, and torch is not loaded again.
            multiprocessing_context="fork",
        )

    def _addresses(self, lane: int | None = None) -> Iterator[tuple[int, Address]]:
        """The lane and the address of every micro-batch in order, or those of one lane."""
        for step in self._steps:
            for place, own in zip(self._places, self._lanes, strict=True):
                if lane is None or own == lane:
                    yield own, (step, *place)

    def _read(self) -> None:
        try:
            if self._pin_to is not None:
                self._pin_to()
            if multiprocessing.current_process().daemon:  # such a process may have none, for they might outlive it; these do not
                multiprocessing.current_process().daemon = False
            before = set(multiprocessing.active_children())
            lanes = [iter(loader) for loader in self._loaders]
            self._children = [child for child in multiprocessing.active_children() if child not in before]
            self._has_started.set()
            for lane, address in self._addresses():
                self._put((address, next(lanes[lane])))
                if self._is_closed:
                    return
            self._hold_open()
        except Exception as problem:
            if not self._is_closed:
                self._put(problem)
        finally:
            self._has_started.set()

    def _hold_open(self) -> None:
        """Stay until all is taken: what was made last lives in the processes until then, and they end with this thread."""
        while not self._is_closed:
            time.sleep(_POLL_S)

    def _put(self, made: tuple[Address, Any] | Exception) -> None:
        while not self._is_closed:
            with suppress(queue.Full):
                self._made.put(made, timeout=_POLL_S)
                return


class _Addresses:
    """The addresses of one lane, as torch's sampler."""

    def __init__(self, addresses: Callable[[int], Iterator[tuple[int, Address]]], lane: int) -> None:
        self._addresses, self._lane = addresses, lane

    def __iter__(self) -> Iterator[Address]:
        return (address for _, address in self._addresses(self._lane))


def _as_it_is(made: Any) -> Any:
    return made
