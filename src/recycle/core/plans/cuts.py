"""Cuts: where each micro-batch is cut at each boundary between two stages, and its form in a plan file.

Boundary s lies between stage s-1 and stage s, for s from 1 to S-1. A cut is an offset in layers from the base boundary: with +1
the stage before computes one layer more for this micro-batch, with -1 the stage after does. In a plan file a boundary is a text
with one letter for each chain: `.` for no offset, `a`, `b`, ... for +1, +2, ..., and `A`, `B`, ... for -1, -2, ...
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from recycle.core.cluster import Shape
from recycle.core.errors import UserError

Cuts = tuple["array[int]", ...]
"""For each boundary in order, the offset of each chain. A plan without cuts has an empty tuple."""

_LETTERS = "ZYXWVUTSRQPONMLKJIHGFEDCBA.abcdefghijklmnopqrstuvwxyz"
_ZERO = _LETTERS.index(".")
_OFFSETS = {letter: index - _ZERO for index, letter in enumerate(_LETTERS)}


def make_cuts(offsets: Iterable[Sequence[int]]) -> Cuts:
    """Return the cuts with these offsets by boundary and chain; an empty tuple if no chain is cut elsewhere than at the base."""
    made = tuple(array("b", boundary) for boundary in offsets)
    return made if any(map(any, made)) else ()


def cuts_to_json(cuts: Cuts) -> list[str]:
    """One text for each boundary; an empty one where no chain has an offset."""
    return ["".join([_LETTERS[_ZERO + offset] for offset in boundary]) if any(boundary) else "" for boundary in cuts]


def cuts_from_json(data: Any, shape: Shape) -> Cuts:
    if not isinstance(data, list) or len(data) != shape.num_stages - 1 or not all(isinstance(text, str) for text in data):
        raise UserError(
            f"the plan's cuts are not a list of {shape.num_stages - 1} texts, one for each boundary between two stages"
        )
    for number, text in enumerate(data, start=1):
        if text and (len(text) != shape.num_chains or set(text) - set(_LETTERS)):
            raise UserError(
                f"the cuts at boundary {number} are not a text of {shape.num_chains} letters, one for each micro-batch: "
                "'.' for the base, 'a' for one layer later, 'A' for one layer earlier"
            )
    return make_cuts([_OFFSETS[letter] for letter in text or "." * shape.num_chains] for text in data)
