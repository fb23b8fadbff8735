"""OpColumns: what one worker ran in an iteration, in columns that are packed once, and passed on without being read."""

import base64
import binascii
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from msgspec import DecodeError
from msgspec.json import Decoder

from recycle.core.errors import UserError

# The label of what a worker runs beside the ops of its row.
REDUCE, OPTIMIZER = "reduce", "optimizer"
# Fast, and within a few per cent of the shortest.
_LEVEL = 3
_decoder = Decoder(tuple[str, list[int], list[int], list[int]])
RanOp = tuple[str, int, int, bool]
"""An op, or `REDUCE` or `OPTIMIZER`: its label, start and end in µs, and whether it was in vain."""


@dataclass(frozen=True, slots=True)
class OpColumns:
    """Start and end of all that was run, and `busy_us`, the sum of its durations. `text` has the columns; it may be empty.

    The rest is about ops of the row that were not in vain: how many, the sum of their durations, the longest, the start of
    the first and the end of the last. `has_vain` says whether others were.
    """

    start_us: int = 0
    end_us: int = 0
    busy_us: int = 0
    num_ops: int = 0
    ops_us: int = 0
    longest_us: int = 0
    first_op_us: int = 0
    last_op_us: int = 0
    has_vain: bool = False
    text: str = ""

    @staticmethod
    def of(ran: Iterable[RanOp]) -> "OpColumns":
        """Pack what was run, in any order."""
        rows = list(ran)
        if not rows:
            return OpColumns()
        labels, starts, ends, vain = zip(*rows, strict=True)
        ops = [(start, end) for label, start, end, in_vain in rows if label not in (REDUCE, OPTIMIZER) and not in_vain]
        durations = [end - start for start, end in ops]
        return OpColumns(
            min(starts),
            max(ends),
            sum(ends) - sum(starts),
            len(ops),
            sum(durations),
            max(durations, default=0),
            min((start for start, _ in ops), default=0),
            max((end for _, end in ops), default=0),
            any(vain),
            _pack(labels, starts, ends, vain, min(starts)),
        )

    def ran(self) -> list[RanOp]:
        """Return what was run, in the order in which it was packed; raises UserError if `text` was not made by `of`."""
        return unpack_ops(self.text, self.start_us)

    def shifted(self, by_us: int) -> "OpColumns":
        """The same at another time."""
        first, last = self.first_op_us + by_us, self.last_op_us + by_us
        return replace(self, start_us=self.start_us + by_us, end_us=self.end_us + by_us, first_op_us=first, last_op_us=last)

    def without_text(self) -> "OpColumns":
        return replace(self, text="")


def _pack(labels: Sequence[str], starts: Sequence[int], ends: Sequence[int], vain: Sequence[bool], base_us: int) -> str:
    # Differences are small numbers: from the end of one to the start of the next, and from there to its end.
    gaps = [start - before for start, before in zip(starts, (base_us, *ends[:-1]), strict=True)]
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    columns = [" ".join(labels), gaps, lengths, [number for number, in_vain in enumerate(vain) if in_vain]]
    return base64.b64encode(zlib.compress(json.dumps(columns, separators=(",", ":")).encode(), _LEVEL)).decode()


def unpack_ops(text: str, base_us: int) -> list[RanOp]:
    """Return what `OpColumns.of` packed; `base_us` is the start of the first. Raises UserError for another text."""
    if not text:
        return []
    try:
        labels, gaps, lengths, vain = _decoder.decode(zlib.decompress(base64.b64decode(text, validate=True)))
        in_vain, at_us, found = set(vain), base_us, []
        for number, (label, gap, length) in enumerate(zip(labels.split(" "), gaps, lengths, strict=True)):
            start = at_us + gap
            at_us = start + length
            found.append((label, start, at_us, number in in_vain))
        return found
    except (ValueError, DecodeError, zlib.error, binascii.Error) as problem:
        raise UserError(f"these are no ops: {type(problem).__name__} {problem}") from None
