"""What a worker ran, packed into columns: everything comes back, and the sums are those of the ops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle.core.errors import UserError
from recycle.core.events.op_columns import OPTIMIZER, REDUCE, OpColumns, unpack_ops
from recycle.core.events.record import OpRan, OpsRan, Stepped
from recycle.core.events.record_file import RecordWriter, read_record

times = st.integers(-(10**6), 10**15)
labels = st.sampled_from(["0F0@1", "12W127@31", REDUCE, OPTIMIZER])
ran_ops = st.lists(st.tuples(labels, times, st.integers(0, 10**6), st.booleans())).map(
    lambda rows: [(label, start, start + length, in_vain) for label, start, length, in_vain in rows]
)


@given(ran_ops, st.integers(-(10**6), 10**6))
def test_everything_comes_back_also_at_another_time(ran, by_us):
    columns = OpColumns.of(ran)
    assert columns.ran() == ran
    moved = [(label, start + by_us, end + by_us, in_vain) for label, start, end, in_vain in ran]
    assert columns.shifted(by_us).ran() == moved


@given(ran_ops.filter(bool))
def test_the_sums_are_those_of_what_was_run(ran):
    columns = OpColumns.of(ran)
    counted = [(start, end) for label, start, end, in_vain in ran if not in_vain and label not in (REDUCE, OPTIMIZER)]
    assert (columns.start_us, columns.end_us) == (min(start for _, start, _, _ in ran), max(end for _, _, end, _ in ran))
    assert columns.busy_us == sum(end - start for _, start, end, _ in ran)
    assert (columns.num_ops, columns.ops_us) == (len(counted), sum(end - start for start, end in counted))
    assert columns.longest_us == max((end - start for start, end in counted), default=0)
    assert columns.first_op_us == min((start for start, _ in counted), default=0)
    assert columns.last_op_us == max((end for _, end in counted), default=0)
    assert columns.has_vain == any(in_vain for *_, in_vain in ran)


def test_a_row_of_a_large_job_takes_a_few_bytes_an_op():
    row = [
        (f"61{kind}{index}", 1000 * (3 * index + n) + index % 7, 1000 * (3 * index + n) + 990, False)
        for index in range(128)
        for n, kind in enumerate("FIW")
    ]
    assert len(OpColumns.of(row).text) < 4 * len(row)


@pytest.mark.parametrize("text", ["x", "????", "eJw=", OpColumns.of([("0F0", 1, 2, False)]).text[:-8]])
def test_another_text_is_refused(text):
    with pytest.raises(UserError, match="these are no ops"):
        unpack_ops(text, 0)


def test_a_reader_of_a_record_gets_every_op_unless_it_wants_them_packed(tmp_path):
    columns = OpColumns.of([("0F0@1", 10, 20, True), ("0F0@1", 20, 31, False), (REDUCE, 40, 41, False)])
    packed = OpsRan(3, "W1_0", columns.start_us, columns.end_us, columns.num_ops, columns.text)
    undone = OpsRan(4, "W1_0", columns.start_us, columns.end_us, columns.num_ops, columns.text, is_undone=True)
    step, path = Stepped(3, 50, 1.0, 1.0, 1.0, 40, 1, True), tmp_path / "record.jsonl"
    RecordWriter(path).write(packed, step, undone)
    ops = [OpRan(3, "W1_0", *op) for op in columns.ran()]
    assert list(read_record(path)) == [*ops, step, *(OpRan(4, "W1_0", *op[:3], True) for op in columns.ran())]
    assert list(read_record(path, is_packed=True)) == [packed, step, undone]
    assert list(read_record(path, num_bytes_without_ops=path.stat().st_size)) == [step]
