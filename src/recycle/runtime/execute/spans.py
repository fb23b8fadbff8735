"""Span: when one op, reduction or optimizer step ran; and `now_us`, the clock that spans are measured by."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from recycle.core.events.op_columns import OPTIMIZER, REDUCE, OpColumns


@dataclass(frozen=True, slots=True)
class Span:
    """Start and end of an op, a reduction or an optimizer step, in µs of the machine's clock.

    `label` is the text of the op, or REDUCE or OPTIMIZER. `asked_us` is when the worker became free for the op and began to wait
    for its message; it does not leave the worker. A discarded op ran in a warm-up on weights that were taken back.
    """

    label: str
    start_us: int
    end_us: int
    is_discarded: bool = False
    asked_us: int = 0

    @property
    def is_op(self) -> bool:
        return self.label not in (REDUCE, OPTIMIZER)


def columns_of(spans: Iterable[Span]) -> OpColumns:
    """Pack spans for a report."""
    return OpColumns.of((span.label, span.start_us, span.end_us, span.is_discarded) for span in spans)


def now_us() -> int:
    return time.monotonic_ns() // 1000
