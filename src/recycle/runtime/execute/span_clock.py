"""SpanClock: when ops began and ended. A GPU runs an op after it was launched: events in its stream say when.

The host launches the next op while the GPU runs this one, so that the GPU does not wait for the host between two ops. It stays at
most `AHEAD` ops ahead: so it knows within a few ops that one is late, and what it reports after a failure is nearly all.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from recycle.runtime.execute.slowed_ops import SlowedOps, StreamIdle
from recycle.runtime.execute.spans import Span, now_us
from recycle.runtime.transport.activity import Doing

AHEAD = 2


class _Launched(NamedTuple):
    """An op that the GPU may still be running, and the list that gets its span."""

    label: str
    asked_us: int
    start: Any
    end: Any
    spans: list[Span]
    launched_s: float


class SpanClock:
    """Measures the spans of one worker, one after the other. `record` records an event in the stream of the ops.

    On a CPU there are no events: an op has ended when its call returns.
    """

    def __init__(
        self, device: torch.device, record: Callable[[], Any] | None = None, idle: Callable[[float], None] | None = None
    ) -> None:
        self._record = record or (partial(_record, device) if device.type == "cuda" else None)
        self.slowed = SlowedOps(self._record, idle or StreamIdle(device))
        self._launched: deque[_Launched] = deque()
        self._zero: tuple[Any, int] | None = None  # an event, and when it was, by the machine's clock
        self._last_end_us = 0

    @property
    def oldest(self) -> str:
        """The label of the first op that the GPU may still be running, or nothing."""
        return self._launched[0].label if self._launched else ""

    def running(self) -> Doing | None:
        """The op that the GPU is running, if there is one. Any thread may ask."""
        with suppress(RuntimeError):  # the list changes meanwhile: the host is not waiting
            for launched in self._launched:
                if not launched.end.query():
                    return Doing(launched.label, "", launched.launched_s)
        return None

    def start(self) -> Any:
        """The start of an op: a time, or an event."""
        if self._record is None:
            return now_us()
        if self._zero is None:
            event = self._record()
            event.synchronize()
            self._zero = event, now_us()
        return self._record()

    def stop(self, label: str, start: Any, spans: list[Span], asked_us: int = 0) -> None:
        """The end of an op that began at `start`: `spans` gets its span, at once or when the GPU has run it."""
        if self._record is None:
            spans.append(Span(label, start, now_us(), asked_us=asked_us))
        else:
            self._launched.append(_Launched(label, asked_us, start, self._record(), spans, time.monotonic()))

    def settle(self, most: int = 0) -> None:
        """Wait until the GPU has at most so many ops left."""
        while len(self._launched) > most:
            self._launched[0].end.synchronize()
            self._take()
        if not self._launched:
            self._zero = None  # the two clocks drift apart: they are compared again

    def settle_spans(self, spans: list[Span]) -> None:
        """Wait for all spans of this list."""
        while any(launched.spans is spans for launched in self._launched):
            self._launched[0].end.synchronize()
            self._take()

    def collect(self) -> None:
        """Take the spans that are known, without waiting: the GPU may hang."""
        while self._launched and self._launched[0].end.query():
            self._take()

    def _take(self) -> None:
        label, asked_us, start, end, spans, _ = self._launched.popleft()
        start_us = max(self._time_us(start), self._last_end_us)
        end_us = max(self._time_us(end), start_us)
        # The worker became free for the op when the GPU had run the one before.
        spans.append(Span(label, start_us, end_us, asked_us=min(start_us, max(asked_us, self._last_end_us))))
        self._last_end_us = end_us

    def _time_us(self, event: Any) -> int:
        assert self._zero is not None
        zero, zero_us = self._zero
        return zero_us + int(1e3 * zero.elapsed_time(event))


def _record(device: torch.device) -> Any:
    # The host is ahead, and may sleep while it waits.
    event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
