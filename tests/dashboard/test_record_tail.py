"""`RecordTail`: new lines are read once, a line that is being written later, and a record that was cut or replaced anew."""

import os

import pytest

from recycle.core.errors import FileProblem
from recycle.core.events.record import Stepped, Warned
from recycle.core.events.record_file import RecordWriter, write_record
from recycle.dashboard.reading.record_tail import RecordTail

ALL = 1 << 30


def texts(tail):
    tail.begin_again_if_replaced()
    return [line.decode().split('"text":"')[1].split('"')[0] for _, line in tail.read(ALL)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "record.jsonl"


def test_lines_are_read_once_as_they_are_added(path):
    writer, tail = RecordWriter(path, [Warned(1, "one")]), RecordTail(path)
    assert texts(tail) == ["one"]
    assert texts(tail) == []
    writer.write(Warned(2, "two"), Warned(3, "three"))
    assert texts(tail) == ["two", "three"]
    assert tail.generation == 1


def test_a_line_that_is_being_written_is_read_when_it_is_whole(path):
    writer, tail = RecordWriter(path, [Warned(1, "one")]), RecordTail(path)
    whole = path.read_bytes()
    writer.write(Warned(2, "two"))
    line = path.read_bytes()[len(whole) :]
    path.write_bytes(whole + line[:20])
    assert texts(tail) == ["one"]
    with path.open("ab") as stream:
        stream.write(line[20:])
    assert texts(tail) == ["two"]


def test_a_record_that_was_cut_and_grew_again_is_read_from_its_start(path):
    writer, tail = RecordWriter(path, [Warned(1, "one"), Warned(2, "lost")]), RecordTail(path)
    assert texts(tail) == ["one", "lost"]
    writer.close()
    lines = path.read_bytes().splitlines(keepends=True)
    os.truncate(path, len(lines[0]) + len(lines[1]))
    RecordWriter(path, None).write(Warned(2, "else"), Warned(3, "more"))
    assert texts(tail) == ["one", "else", "more"]
    assert tail.generation == 2


def test_a_record_that_was_written_anew_is_read_from_its_start(path):
    write_record(path, [Warned(1, "one")])
    tail = RecordTail(path)
    assert texts(tail) == ["one"]
    write_record(path, [Warned(1, "one"), Warned(2, "two")])
    assert texts(tail) == ["one", "two"]


def test_a_record_may_be_missing_at_first_and_is_found_later(path):
    tail = RecordTail(path)
    with pytest.raises(FileProblem, match="no such file yet"):
        texts(tail)
    write_record(path, [Warned(1, "one")])
    assert texts(tail) == ["one"]
    assert tail.generation == 1


def test_another_kind_of_file_is_refused(path):
    path.write_text("<html>\n")
    with pytest.raises(FileProblem, match="is not a recycle-record file"):
        texts(RecordTail(path))


def test_a_long_record_can_be_read_in_parts(path):
    write_record(path, [Stepped(number, number, 1.0, 1.0, 1.0) for number in range(100)])
    tail, num = RecordTail(path), 0
    tail.begin_again_if_replaced()
    while lines := list(tail.read(500)):
        assert sum(len(line) for _, line in lines) < 700
        num += len(lines)
    assert num == 100
