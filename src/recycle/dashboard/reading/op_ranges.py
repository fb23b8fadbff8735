"""`OpRanges`: where in a record the ops of each iteration are, so that a long record is read without keeping its ops."""

import re
from array import array
from collections.abc import Iterator
from typing import BinaryIO

from recycle.core.errors import UserError
from recycle.core.events.record import OpRan, OpsRan
from recycle.core.events.record_file import parse_line

_OPS = re.compile(rb'\{"event":"ops?","iteration":(\d{1,18}),')


def iteration_of_ops(line: bytes) -> int | None:
    """The iteration of a line with ops; None for another line."""
    match = _OPS.match(line)
    return int(match[1]) if match else None


class OpRanges:
    """Neighbouring lines with ops of the same iteration are one range."""

    def __init__(self) -> None:
        self._iterations, self._starts, self._ends = array("q"), array("q"), array("q")
        self._numbers: set[int] = set()

    def add(self, iteration: int, start: int, num_bytes: int) -> None:
        if self._iterations and self._iterations[-1] == iteration and self._ends[-1] == start:
            self._ends[-1] += num_bytes
            return
        self._iterations.append(iteration)
        self._starts.append(start)
        self._ends.append(start + num_bytes)
        self._numbers.add(iteration)

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The first and the last iteration with ops."""
        return (min(self._numbers), max(self._numbers)) if self._numbers else None

    def __contains__(self, iteration: int) -> bool:
        return iteration in self._numbers

    def num_bytes(self, iteration: int) -> int:
        """How long the lines of an iteration are: it changes when another attempt of the iteration was reported."""
        return sum(end - start for start, end in self._of(iteration))

    def ops(self, record: BinaryIO, iteration: int) -> Iterator[OpRan]:
        """Yield the ops of one iteration, of all attempts; a damaged line is left out."""
        for start, end in self._of(iteration):
            record.seek(start)
            for line in record.read(end - start).splitlines():
                yield from _ops_of(line)

    def _of(self, iteration: int) -> list[tuple[int, int]]:
        if iteration not in self._numbers:
            return []
        rows = zip(self._iterations, self._starts, self._ends, strict=True)
        return [(start, end) for number, start, end in rows if number == iteration]


def _ops_of(line: bytes) -> list[OpRan]:
    try:
        event, _ = parse_line(line)
        if isinstance(event, OpsRan):
            return list(event.each())
        return [event] if isinstance(event, OpRan) else []
    except UserError:
        return []
