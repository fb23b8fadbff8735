"""`OpenRuns`: the readers of the runs that pages show now, and the iterations that were decoded last."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from recycle.dashboard.reading.run_reader import PART_BYTES, RunReader
from recycle.dashboard.views.iteration_view import IterationOps
from recycle.dashboard.views.run_list import RunList
from recycle.dashboard.web.page_stream import PageStream

_MOST_RUNS, _MOST_ITERATIONS, _MOST_PAGES = 16, 4, 200


class OpenRuns:
    """Reads each run once, a long record in parts, and what was added since with every request.

    Runs that nobody looked at for long are forgotten.
    """

    def __init__(self, runs: RunList) -> None:
        self._runs = runs
        self._readers: OrderedDict[str, tuple[RunReader, PageStream, asyncio.Lock]] = OrderedDict()
        self._iterations: OrderedDict[tuple[str, int, int, int], IterationOps] = OrderedDict()

    @asynccontextmanager
    async def opened(self, run_id: str) -> AsyncIterator[RunReader]:
        """The reader of a run, up to date; raises UserError if there is no such run."""
        run, _, lock = self._open(run_id)
        async with lock:
            await asyncio.to_thread(run.read, PART_BYTES)
            yield run

    def stream(self, run_id: str) -> PageStream:
        """What pushes the changes of a run."""
        return self._open(run_id)[1]

    def iteration(self, run: RunReader, number: int) -> IterationOps:
        """The ops of an iteration, decoded once for all its lanes."""
        key = (str(run.record), run.generation, number, run.op_ranges.num_bytes(number) + len(run.recoveries))
        if key not in self._iterations:
            self._iterations[key] = IterationOps.of(run, number)
            while len(self._iterations) > _MOST_ITERATIONS:
                self._iterations.popitem(last=False)
        return self._iterations[key]

    def _open(self, run_id: str) -> tuple[RunReader, PageStream, asyncio.Lock]:
        if run_id not in self._readers:
            lock, run = asyncio.Lock(), RunReader(self._runs.record(run_id), self._runs.folder)
            self._readers[run_id] = run, PageStream(run, lock, _MOST_PAGES), lock
            while len(self._readers) > _MOST_RUNS:
                self._forget_one()
        self._readers.move_to_end(run_id)
        return self._readers[run_id]

    def _forget_one(self) -> None:
        """Forget the run that was asked for longest ago, unless a page shows it."""
        for run_id, (_, stream, _) in self._readers.items():
            if not stream.has_pages:
                del self._readers[run_id]
                return
        self._readers.popitem(last=False)
