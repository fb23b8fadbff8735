"""A plan as a short text: its columns, compressed. The journal has plans in this form, which is read and written in milliseconds.

The JSON of a plan is for people and other programs; for thousands of workers it takes seconds to read.
"""

import base64
import binascii
import json
import sys
import zlib
from array import array
from itertools import accumulate, pairwise

from recycle.core.cluster import Worker
from recycle.core.errors import FileProblem, UserError
from recycle.core.plans.plan import Plan, Row

# The columns of the largest plan, see `core.cluster`, are smaller: more bytes are a mistake, or meant to fill the memory.
_MOST_BYTES = 1 << 32
_OP_BYTES = 1 + 4 + 8  # kind, chain and start


def pack_plan(plan: Plan) -> str:
    """Return the text that `unpack_plan` reads."""
    head = json.dumps(plan.head() | {"rows": [[str(row.worker), len(row)] for row in plan.rows]}).encode()
    kinds = "".join([row.kinds for row in plan.rows]).encode()
    chains, starts = array("i"), array("q")
    for row in plan.rows:
        chains.extend(array("i", row.chains))
        starts.extend(row.starts_us)
    content = b"".join((len(head).to_bytes(8, "little"), head, kinds, _little(chains), _little(starts)))
    return base64.b64encode(zlib.compress(content, 1)).decode()


def unpack_plan(text: str) -> Plan:
    """Return the plan of a text of `pack_plan`. Raises FileProblem for anything else."""
    try:
        return _unpack(base64.b64decode(text, validate=True))
    except (
        binascii.Error,
        zlib.error,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
        UserError,
    ) as problem:
        raise FileProblem(f"this is no packed plan: {type(problem).__name__} {problem}") from None


def _unpack(packed: bytes) -> Plan:
    reader = zlib.decompressobj()
    content = memoryview(reader.decompress(packed, _MOST_BYTES))
    if not reader.eof:
        raise ValueError("it is cut short, or too long")
    start = 8 + int.from_bytes(content[:8], "little")
    head = json.loads(bytes(content[8:start]))
    rows = [(Worker.parse(name), length) for name, length in head.pop("rows")]
    ends = [0, *accumulate(length for _, length in rows)]
    num_ops = ends[-1]
    if min((length for _, length in rows), default=0) < 0 or len(content) != start + _OP_BYTES * num_ops:
        raise ValueError("its columns are not as long as its rows")
    kinds = bytes(content[start : start + num_ops]).decode("ascii")
    chains, starts = array("i"), array("q")
    chains.frombytes(content[start + num_ops : start + 5 * num_ops])
    starts.frombytes(content[start + 5 * num_ops :])
    if sys.byteorder == "big":
        chains.byteswap()
        starts.byteswap()
    made = (
        Row(worker, kinds[first:end], array("q", chains[first:end]), starts[first:end])
        for (worker, _), (first, end) in zip(rows, pairwise(ends), strict=True)
    )
    return Plan.from_head(head, tuple(made))


def _little(column: "array[int]") -> bytes:
    """The bytes of a column, on every machine in the same order."""
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()
