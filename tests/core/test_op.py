"""Ops and their text form, which torch.distributed.pipelining shares."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle.core.errors import UserError
from recycle.core.op import Kind, MicroBatch, Op

NUMBERS = st.integers(0, 5000)
OPS = st.builds(Op, NUMBERS, st.sampled_from(Kind), st.builds(MicroBatch, NUMBERS, NUMBERS))


@given(OPS)
def test_an_op_survives_its_text_form(op):
    assert Op.parse(str(op)) == op


@given(OPS, NUMBERS)
def test_an_op_survives_its_text_form_inside_a_row(op, pipeline):
    assert Op.parse(op.text(pipeline), pipeline) == op


def test_an_op_is_written_stage_kind_index_and_home():
    op = Op(2, Kind.F, MicroBatch(pipeline=1, index=0))
    assert str(op) == "2F0@1"
    assert op.text(pipeline=1) == "2F0"
    assert op.text(pipeline=0) == "2F0@1"


def test_a_row_supplies_the_home_that_an_op_leaves_out():
    assert Op.parse("3W5", pipeline=7) == Op(3, Kind.W, MicroBatch(7, 5))
    assert Op.parse("3W5@2", pipeline=7) == Op(3, Kind.W, MicroBatch(2, 5))


@pytest.mark.parametrize("text", ["", "2F0", "2X0@1", "2f0@1", "F0@1", "2F@1", "2F0@", "2F0@-1", "2F0@1 ", "2.5F0@1"])
def test_a_text_that_is_no_op_is_refused_by_name(text):
    with pytest.raises(UserError, match="is not an op") as caught:
        Op.parse(text)
    assert repr(text) in str(caught.value)
