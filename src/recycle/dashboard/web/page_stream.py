"""`PageStream`: what changed in a run, pushed to every page that shows it. A change is encoded once for all pages."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from recycle.dashboard.reading.run_reader import PART_BYTES, RunReader
from recycle.dashboard.views.overview import has_ended, overview_head, points_since, recovery, spent_time, waits_for
from recycle.dashboard.web.json_body import json_body

# How often a record is looked at, and how often pages hear that the server is there.
_LOOK_S, _BEAT_S = 0.2, 10.0
# A page is told so often how far a long record was read, which it then loads anew.
_WHILE_READING_S = 1.0
# News goes to all pages at once. Steps alone wait so long for each page that is open: many pages cost little more than one.
_STEPS_S_A_PAGE, _LONGEST_STEPS_S = 0.02, 1.0
# Shares of time are computed from all spells: at most so much of the time goes into that.
_SHARE_OF_TIME = 0.02


class TooManyPages(Exception):
    """As many pages as this server serves are open already."""


class PageStream:
    """Follows one run as long as a page shows it. A page that is slow to read gets the newest change and misses those before."""

    def __init__(self, run: RunReader, lock: asyncio.Lock, most_pages: int) -> None:
        self._run, self._lock, self._most_pages = run, lock, most_pages
        self._pages: set[asyncio.Queue[bytes]] = set()
        self._task: asyncio.Task[None] | None = None
        self._shares_due_s = 0.0
        self._pushed: tuple[int, int, str, bool] = (0, 0, "", False)
        self._news: object = None
        self._pushed_at_s = 0.0
        self._counts = (0, 0, 0)
        self._workers: dict[str, Any] = {}

    @property
    def has_pages(self) -> bool:
        return bool(self._pages)

    @property
    def is_full(self) -> bool:
        return len(self._pages) >= self._most_pages

    async def listen(self) -> AsyncIterator[bytes]:
        """Yield server-sent events: one for each change, and a comment now and then."""
        queue: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)
        self._pages.add(queue)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._follow())
        try:
            yield b"retry: 1000\n\n"
            while True:
                yield await queue.get()
        finally:
            self._pages.discard(queue)

    async def _follow(self) -> None:
        """Look at the record until no page is left."""
        run = self._run
        while self._pages:
            async with self._lock:
                share_before = run.share_read
                await asyncio.to_thread(run.read, PART_BYTES)
                has_more = share_before < run.share_read < 1  # of a record that cannot be read on, the share stays
                if self._is_due(now := (run.generation, run.version, run.problem, has_ended(run))):
                    self._push(await asyncio.to_thread(self._change))
                    self._pushed = now
                    self._counts = len(run.columns.at_us), len(run.columns.spell_end_us), len(run.recoveries)
            if time.monotonic() > self._pushed_at_s + _BEAT_S:
                self._beat()
            await asyncio.sleep(0 if has_more else _LOOK_S)

    def _is_due(self, now: tuple[int, int, str, bool]) -> bool:
        """Whether there is something to push: news, or steps that have waited long enough."""
        if now == self._pushed:
            return False
        if self._run.share_read < 1:  # pages load the whole state with each change, and there is more to read
            return time.monotonic() >= self._pushed_at_s + _WHILE_READING_S
        run, before = self._run, self._news
        self._news = (dict(run.state.places), dict(run.state.facts.speeds), len(run.recoveries), waits_for(run), now[0], now[2:])
        wait_s = min(_LONGEST_STEPS_S, _STEPS_S_A_PAGE * len(self._pages))
        return self._news != before or time.monotonic() >= self._pushed_at_s + wait_s

    def _change(self) -> bytes:
        """Return what changed since the last push: a page that has the version of that push needs nothing else."""
        run, (generation, version, *_) = self._run, self._pushed
        num_steps, num_spells, num_recoveries = self._counts if run.generation == generation else (0, 0, 0)
        points = points_since(run, num_steps, num_spells) if run.generation == generation else None
        now = overview_head(run)
        before, self._workers = self._workers if run.generation == generation else {}, now["workers"]
        message: dict[str, Any] = {
            **now,
            "workers": {name: about for name, about in now["workers"].items() if before.get(name) != about},
            "from_version": version if points is not None else None,
            "points": points,
            "new_recoveries": [recovery(number, run.recoveries[number]) for number in range(num_recoveries, len(run.recoveries))],
        }
        began_s = time.monotonic()
        if began_s >= self._shares_due_s:
            message["shares"] = spent_time(run)
            self._shares_due_s = began_s + max(1.0, (time.monotonic() - began_s) / _SHARE_OF_TIME)
        return b"data: " + json_body(message) + b"\n\n"

    def _beat(self) -> None:
        """Tell the pages that have read everything that the server is there."""
        self._pushed_at_s = time.monotonic()
        for queue in self._pages:
            if queue.empty():
                queue.put_nowait(b": still here\n\n")

    def _push(self, change: bytes) -> None:
        self._pushed_at_s = time.monotonic()
        for queue in self._pages:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(change)
