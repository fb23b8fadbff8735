"""SlowedOps: ops that take longer on purpose. A GPU idles after each in its own stream, so that the host stays ahead of it.

If the host waited for every op instead, the GPU would wait for the next launch: the worker would be slower than it is said to be.
"""

import time
from collections.abc import Callable, Hashable
from typing import Any

import torch

from recycle.runtime.execute.spans import now_us

_CALIBRATION_CYCLES = 10_000_000


class SlowedOps:
    """Slows the ops of one worker. On a GPU, `idle` lets the stream do nothing for so many ms, and `record` records an event."""

    def __init__(self, record: Callable[[], Any] | None, idle: Callable[[float], None]) -> None:
        self._record, self._idle = record, idle
        self._took_ms: dict[Hashable, float] = {}
        self._running: list[tuple[Hashable, Any, Any]] = []

    def slow_down(self, start: Any, speed: float, op_class: Hashable) -> None:
        """Let the op that began at `start` take 1 / `speed` of the time that it, or the last known one of its class, took."""
        longer = 1 / speed - 1
        if self._record is None:
            time.sleep((now_us() - start) / 1e6 * longer)
            return
        self._running = [one for one in self._running if not self._measured(*one)]
        ran = self._record()
        if op_class not in self._took_ms:
            ran.synchronize()
            self._took_ms[op_class] = start.elapsed_time(ran)
        else:
            self._running.append((op_class, start, ran))
        self._idle(self._took_ms[op_class] * longer)

    def _measured(self, op_class: Hashable, start: Any, ran: Any) -> bool:
        """Whether the GPU has run that op; then its time counts for the next of its class."""
        is_over: bool = ran.query()
        if is_over:
            self._took_ms[op_class] = start.elapsed_time(ran)
        return is_over


class StreamIdle:
    """Called with a time in ms: the stream of a GPU does nothing for about that long."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cycles_per_ms = device, 0.0

    def __call__(self, time_ms: float) -> None:
        if not self._cycles_per_ms:
            self._cycles_per_ms = self._calibrate()
        torch.cuda._sleep(round(time_ms * self._cycles_per_ms))  # type: ignore[no-untyped-call]

    def _calibrate(self) -> float:
        torch.cuda._sleep(_CALIBRATION_CYCLES)  # type: ignore[no-untyped-call] # a first kernel also loads its code
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        stream = torch.cuda.current_stream(self._device)
        events[0].record(stream)
        torch.cuda._sleep(_CALIBRATION_CYCLES)  # type: ignore[no-untyped-call]
        events[1].record(stream)
        events[1].synchronize()
        return _CALIBRATION_CYCLES / float(events[0].elapsed_time(events[1]))
