"""A packed plan is the same plan; anything else is refused, whatever its bytes are."""

import base64
import contextlib
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recycle
from recycle.core.errors import FileProblem
from recycle.core.plans.packed_plan import pack_plan, unpack_plan


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.sampled_from(["", "W0_0"]))
def test_a_packed_plan_is_the_same_plan(pipelines: int, stages: int, microbatches: int, fail: str) -> None:
    made = recycle.problem(pipelines, stages, microbatches, costs="10,13,9", fail=fail if pipelines > 1 else "")
    plan = recycle.solve(made, method="greedy", effort=1000)
    assert unpack_plan(pack_plan(plan)) == plan
    assert unpack_plan(pack_plan(plan)).dumps() == plan.dumps()


def test_a_packed_plan_is_a_fraction_of_its_json() -> None:
    plan = recycle.solve(recycle.problem(8, 8, 32, costs="10,13,9"), method="greedy", effort=1000)
    assert len(pack_plan(plan)) < len(plan.dumps()) / 2


def packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()


PLAN = pack_plan(recycle.solve(recycle.problem(2, 2, 2, costs="1,1,1"), method="greedy", effort=100))


def without(name: str) -> str:
    content = zlib.decompress(base64.b64decode(PLAN))
    size = int.from_bytes(content[:8], "little")
    head = json.loads(content[8 : 8 + size])
    del head[name]
    text = json.dumps(head).encode()
    return packed(len(text).to_bytes(8, "little") + text + content[8 + size :])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a plan",
        "é",
        PLAN[:-8],
        PLAN[4:],
        packed(b""),
        packed(b"\xff" * 100),
        packed(zlib.decompress(base64.b64decode(PLAN)) + b"1"),
        packed(zlib.decompress(base64.b64decode(PLAN))[:-1]),
        without("rows"),
        without("problem"),
        without("bound_us"),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(FileProblem, match="no packed plan"):
        unpack_plan(text)


@given(st.integers(0, len(PLAN) - 1), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_harmless(at: int, to: int) -> None:
    changed = bytearray(PLAN.encode())
    changed[at] = to
    with contextlib.suppress(FileProblem):  # and no other error
        assert len(unpack_plan(changed.decode("latin-1")).rows) == 4
