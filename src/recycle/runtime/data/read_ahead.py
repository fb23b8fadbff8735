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
from functools import partial
from multiprocessing.connection import wait
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader

from recycle.core import errors
from recycle.core.errors import DataFailed, UserError
from recycle.runtime.boundary.nests import Nest
from recycle.runtime.compute.microbatches import MicroBatchSource, read_part
from recycle.runtime.data.data_options import DataOptions
from recycle.runtime.data.loader_process import MADE, REFUSED, Address, AddressedMicroBatches

_POLL_S, _READY = 0.05, 2
# Processes of which nothing comes for so long are started again; the next ones have twice as long.
_PATIENCE_S = 20.0
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
    """Reads where it is asked, between the ops of the worker. `takes` says whether inputs and targets are asked for."""

    def __init__(self, source: MicroBatchSource, takes: tuple[bool, bool] = (True, True)) -> None:
        self._source, self._takes, self.waited_us = source, takes, 0

    def get(self, step: int, pipeline: int, index: int) -> tuple[Nest, Nest]:
        start_ns = time.monotonic_ns()
        made = read_part(self._source, (step, pipeline, index), self._takes)
        if isinstance(self._source, StreamReader):
            self._source.keep_positions(self._source.positions_after(step, pipeline, index))
        self.waited_us += (time.monotonic_ns() - start_ns) // 1000
        return made

    def close(self) -> None:
        pass


class ReadAhead:
    """Micro-batches of `steps` at the `places` (pipeline, index), in the order of a worker's row.

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
        self._source, self._options, self._on_wait = source, options, on_wait
        self._start = partial(LoaderProcesses, source, options, places, takes, pin_to)
        self._places, self._steps = places, steps
        self._processes, self._patience_s = self._start(steps), _PATIENCE_S

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
        self._processes.close()

    def _next(self, wanted: Address) -> tuple[Address, Any]:
        since_s, seen = time.monotonic(), self._processes.num_made
        while True:
            if (made := self._processes.take(_POLL_S)) is not None:
                return made
            has_moved, seen = self._processes.num_made != seen, self._processes.num_made
            since_s = time.monotonic() if has_moved else since_s
            self._on_wait(has_moved)
            self._processes.refuse_dead()
            if (waited_s := time.monotonic() - since_s) > self._options.timeout_s:
                raise DataFailed(self._describe_stuck(wanted, waited_s))
            if waited_s > self._patience_s:
                self._restart(wanted)
                since_s, seen = time.monotonic(), 0

    def _restart(self, wanted: Address) -> None:
        """Start the processes again from a micro-batch on, and wait twice as long for them.

        A lock that another thread of the worker held when a process was forked stays locked there for ever.
        """
        self._patience_s *= 2
        self._processes.close()
        step, *place = wanted
        self._processes = self._start(range(step, self._steps.stop), self._places.index((place[0], place[1])))

    def _describe_stuck(self, wanted: Address, waited_s: float) -> str:
        step, pipeline, index = wanted
        numbers = getattr(self._source, "numbers", None)
        samples = f" (samples {', '.join(map(str, numbers(*wanted)))})" if numbers is not None else ""
        return (
            f"no sample was made for {waited_s:.0f} s, and a worker waits for micro-batch {index} of pipeline {pipeline} in step "
            f"{step + 1}{samples}: mend the dataset, or allow more time with timeout_s"
        )


class LoaderProcesses:
    """The loader processes of a `ReadAhead`, and the thread that asks them. In the first step they begin at place `first`."""

    def __init__(
        self,
        source: MicroBatchSource,
        options: DataOptions,
        places: Sequence[tuple[int, int]],
        takes: tuple[bool, bool],
        pin_to: Callable[[], object] | None,
        steps: range,
        first: int = 0,
    ) -> None:
        self._source, self._places, self._steps, self._options, self._pin_to = source, places, steps, options, pin_to
        self._first = first
        self._progress = multiprocessing.get_context("fork").RawValue("q", 0)
        self._made: queue.Queue[tuple[Address, Any] | Exception] = queue.Queue(_READY)
        self._is_closed, self._has_started = False, threading.Event()
        self.children: list[Any] = []
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # more than cores: they may wait for disks
        self._lanes, processes = lanes_of(source, places, options.loader_processes)
        self._loaders = [self._loader(lane, processes, takes) for lane in range(max(self._lanes) + 1)]
        # A daemon: it ends when it notices that its processes have ended, which may be after the worker has gone on.
        threading.Thread(target=self._read, name="reading data", daemon=True).start()
        self._has_started.wait()

    @property
    def num_made(self) -> int:
        """A number that changes with every sample that is made."""
        return int(self._progress.value)

    def take(self, timeout_s: float) -> tuple[Address, Any] | None:
        """The next micro-batch, or None if it does not come in time."""
        try:
            made = self._made.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(made, Exception):
            self.refuse_dead()
            raise made
        return made

    def close(self) -> None:
        self._is_closed = True
        for child in self.children:
            with suppress(ValueError, ProcessLookupError):
                child.kill()
        with suppress(queue.Empty):
            while True:
                self._made.get_nowait()

    def refuse_dead(self) -> None:
        """Raise if a process has ended."""
        ended = wait([child.sentinel for child in self.children], 0)
        for child in self.children:
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
            for number, (place, own) in enumerate(zip(self._places, self._lanes, strict=True)):
                if (lane is None or own == lane) and (step > self._steps.start or number >= self._first):
                    yield own, (step, *place)

    def _read(self) -> None:
        try:
            if self._pin_to is not None:
                self._pin_to()
            if multiprocessing.current_process().daemon:  # such a process may have none, for they might outlive it; these do not
                multiprocessing.current_process().daemon = False
            before = set(multiprocessing.active_children())
            lanes = [iter(loader) for loader in self._loaders]
            self.children = [child for child in multiprocessing.active_children() if child not in before]
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
