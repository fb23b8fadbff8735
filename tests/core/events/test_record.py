"""The events of a run, and the record file."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle.core.errors import FileProblem
from recycle.core.events.record import Changed, Held, Joining, OpRan, Placed, Recovered, Spell, Started, Stepped, Suspected
from recycle.core.events.record_file import RecordWriter, dump_event, later_plans, plan_file, read_record, write_record

EVENTS = [
    Started("simulate", "spot · 3 µs"),
    OpRan(0, "W0_1", "1F0@2", 5, 9),
    Changed(10, "W0_1", False, 3),
    Spell(9, 30, "pause", cause="W0_1 left", num_live=3),
    Spell(30, 90, "train", samples=64, num_live=3),
]
HEAD = '{"format": "recycle-record", "version": 1}\n'
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
TIME = st.integers(0, 10**15)
EVENT = st.one_of(
    st.builds(Started, TEXT, TEXT),
    st.builds(OpRan, TIME, TEXT, TEXT, TIME, TIME),
    st.builds(Changed, TIME, TEXT, st.booleans(), TIME),
    st.builds(Spell, TIME, TIME, TEXT, cause=TEXT, samples=TIME, num_live=TIME),
    st.builds(Placed, TIME, TEXT, TEXT, TIME),
    st.builds(Joining, TIME, TEXT),
    st.builds(Suspected, TIME, TEXT, TEXT),
    st.builds(
        Recovered,
        TIME,
        TIME,
        TIME,
        st.lists(TEXT).map(tuple),
        st.booleans(),
        TEXT,
        TIME,
        detect_us=TIME,
        redo_us=TIME,
        moves=st.lists(TEXT).map(tuple),
    ),
)
RECOVERED = Recovered(
    5000, 9000, 3, ("W1_2", "W0_0"), False, "it failed: no memory", 4, 1, 2, 3, 4, 5, 6, 7, ("W0_1>W1_2", "W2_0>W0_0"), 10
)


def test_an_event_is_a_line_that_names_its_kind():
    line = '{"event":"changed","at_us":10,"node":"W0_1","joins":false,"num_live":3,"line":7}'
    assert dump_event(Changed(10, "W0_1", False, 3), 7) == line
    assert dump_event(EVENTS[0], 2) == '{"event":"started","source":"simulate","name":"spot · 3 µs","line":2}'


def test_a_record_is_a_head_and_a_line_for_each_event(tmp_path):
    write_record(tmp_path / "run.jsonl", EVENTS)
    head, *lines = (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(head) == {"format": "recycle-record", "version": 1}
    assert [json.loads(line)["event"] for line in lines] == ["started", "op", "changed", "spell", "spell"]


@given(EVENT)
def test_an_event_comes_to_another_process_as_it_is(event):
    assert pickle.loads(pickle.dumps(event)) == event


@given(st.lists(EVENT))
def test_events_are_read_back_as_they_were_written(tmp_path_factory, events):
    path = tmp_path_factory.mktemp("record") / "run.jsonl"
    write_record(path, events)
    assert list(read_record(path)) == events


def test_a_record_whose_writer_died_is_read_up_to_its_last_whole_line(tmp_path):
    path = tmp_path / "run.jsonl"
    write_record(path, EVENTS)
    whole = path.read_bytes()
    for length in range(len(HEAD), len(whole)):
        path.write_bytes(whole[:length])
        num_whole = whole[:length].count(b"\n") - 1
        # An event whose line lacks nothing but its end is whole too.
        assert list(read_record(path)) in (EVENTS[:num_whole], EVENTS[: num_whole + 1])
        assert len(list(read_record(path))) == num_whole + (whole[length : length + 1] == b"\n")


def read_with_gaps(path):
    gaps = []
    return list(read_record(path, gaps=gaps)), gaps


def test_a_record_that_grew_in_parts_has_no_gaps(tmp_path):
    path = tmp_path / "run.jsonl"
    for num, begin in ((2, EVENTS[:1]), (1, None), (1, None)):
        writer = RecordWriter(path, begin)
        writer.write(*EVENTS[:num])
        writer.close()
    assert read_with_gaps(path) == ([EVENTS[0], *EVENTS[:2], EVENTS[0], EVENTS[0]], [])


@pytest.mark.parametrize(
    ("kept", "gaps"),
    [
        ([0, 1, 2, 3, 4], []),
        ([0, 1, 3, 4], ["line 4 is missing"]),
        ([1, 4], ["line 2 is missing", "lines 4 to 5 are missing"]),
        ([0, 1, 1, 2, 3, 4], ["line 3 is there a second time, or not in its place"]),
    ],
)
def test_lines_that_are_missing_are_told(tmp_path, kept, gaps):
    path = tmp_path / "run.jsonl"
    write_record(path, EVENTS)
    head, *lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join([head, *(lines[number] for number in kept)]), encoding="utf-8")
    assert read_with_gaps(path) == ([EVENTS[number] for number in kept], gaps)


def test_a_last_line_that_is_cut_off_is_told(tmp_path):
    path = tmp_path / "run.jsonl"
    write_record(path, EVENTS)
    path.write_bytes(path.read_bytes()[:-10])
    assert read_with_gaps(path) == (EVENTS[:-1], ["its last line is cut off"])


def test_a_record_without_numbers_has_no_gaps(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(HEAD + '{"event": "started", "source": "train", "name": "x"}\n' * 2)
    assert read_with_gaps(path) == ([Started("train", "x")] * 2, [])


def test_a_line_that_is_broken_in_the_middle_is_named(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(HEAD + '{"event": "sta\n' + dump_event(EVENTS[1], 3) + "\n")
    with pytest.raises(FileProblem, match="line 2: this is not an event of a record"):
        list(read_record(path))


def test_a_key_that_a_later_release_added_is_passed_over(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(HEAD + '{"event": "started", "source": "train", "name": "x", "colour": "red"}\n')
    assert list(read_record(path)) == [Started("train", "x")]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        pytest.param(b"", "is not a recycle-record file", id="empty"),
        pytest.param(bytes(range(256)), "is not a recycle-record file", id="binary"),
        pytest.param(b"[]\n", "is not a recycle-record file", id="a list"),
        pytest.param(b'{"format": "recycle-plan", "version": 1}\n', "is not a recycle-record file", id="a plan"),
        pytest.param(b'{"format": "recycle-record", "version": 2}', "version 2, but this release reads version 1", id="version"),
        pytest.param(HEAD.encode() + b'{"event": "flew"}\n\n', "line 2: this is not an event", id="an unknown event"),
        pytest.param(HEAD.encode() + b'{"event": "op"}\n', "line 2: the event 'op' is not whole", id="an event without facts"),
        pytest.param(HEAD.encode() + b"7\n\n", "line 2: this is not an event", id="a number"),
    ],
)
def test_a_file_that_is_no_record_is_explained(data, sentence, tmp_path):
    (tmp_path / "run.jsonl").write_bytes(data)
    with pytest.raises(FileProblem, match=sentence):
        list(read_record(tmp_path / "run.jsonl"))


@pytest.mark.parametrize(
    ("event", "name", "value"),
    [
        pytest.param(OpRan(0, "W0_0", "0F0@0", 0, 1), "start_us", "x", id="a word for a time"),
        pytest.param(OpRan(0, "W0_0", "0F0@0", 0, 1), "end_us", 2**62, id="a time too late for 64 bits"),
        pytest.param(OpRan(0, "W0_0", "0F0@0", 0, 1), "end_us", -(2**70), id="a time too early for 64 bits"),
        pytest.param(OpRan(0, "W0_0", "0F0@0", 0, 1), "worker", ["W0_0"], id="a list for a worker"),
        pytest.param(Stepped(0, 1, 1.0, 1.0, 1.0), "loss", "much", id="a loss in words"),
        pytest.param(Stepped(0, 1, 1.0, 1.0, 1.0), "iteration", 1.5, id="half an iteration"),
        pytest.param(Stepped(0, 1, 1.0, 1.0, 1.0), "has_begun_again", 1, id="a number for a truth"),
        pytest.param(Held("W0_0", 1, 1, 1), "planned_bytes", None, id="no bytes"),
        pytest.param(RECOVERED, "workers", "W1_1", id="a worker for a list"),
        pytest.param(RECOVERED, "moves", [7], id="a number for a move"),
        pytest.param(RECOVERED, "cause", None, id="no cause"),
    ],
)
def test_a_value_of_another_type_is_named_with_its_line(event, name, value, tmp_path):
    data = {**json.loads(dump_event(event, 2)), name: value}
    (tmp_path / "run.jsonl").write_text(HEAD + json.dumps(data) + "\n" + dump_event(EVENTS[1], 3) + "\n")
    with pytest.raises(FileProblem, match=rf"line 2: the event '{data['event']}' is not whole: .* at `\$\.{name}"):
        list(read_record(tmp_path / "run.jsonl"))


def test_a_value_of_another_type_before_the_end_of_a_cut_line_is_no_reason_to_refuse_it(tmp_path):
    (tmp_path / "run.jsonl").write_text(HEAD + '{"event":"step","iteration":"x","at')
    assert read_with_gaps(tmp_path / "run.jsonl") == ([], ["its last line is cut off"])


def test_a_record_that_cannot_be_read_is_explained(tmp_path):
    with pytest.raises(FileProblem, match=r"cannot read .*: No such file"):
        list(read_record(tmp_path / "nowhere"))
    with pytest.raises(FileProblem, match=r"cannot read .*: Is a directory"):
        list(read_record(tmp_path))


def test_a_spell_has_a_length():
    assert Spell(9, 30, "down").length_us == 21


def test_a_recovery_is_the_sum_of_its_six_parts():
    assert RECOVERED.parts_us == {"detect": 1, "abort": 2, "plan": 3, "regroup": 4, "transfer": 5, "redo": 6}
    assert RECOVERED.lost_us == 21
    assert Recovered(0, 1, 1, ("W0_0",), True, "it asked to join", 0).lost_us == 0


def test_a_recovery_is_read_back_with_tuples(tmp_path):
    write_record(tmp_path / "run.jsonl", [RECOVERED])
    (read,) = read_record(tmp_path / "run.jsonl")
    assert read == RECOVERED
    assert (type(read.workers), type(read.moves)) == (tuple, tuple)


def test_a_loss_that_is_not_finite_becomes_none(tmp_path):
    write_record(tmp_path / "run.jsonl", [Stepped(0, 1, float("nan"), float("inf"), 1.0)])
    assert list(read_record(tmp_path / "run.jsonl")) == [Stepped(0, 1, None, None, 1.0)]


def test_what_a_recovery_did_not_need_is_not_in_its_line():
    line = dump_event(Recovered(5, 9, 1, ("W1_2",), False, "its connection closed", 4, detect_us=4), 2)
    assert line == (
        '{"event":"recovery","at_us":5,"end_us":9,"epoch":1,"workers":["W1_2"],"joins":false,'
        '"cause":"its connection closed","iteration":4,"detect_us":4,"line":2}'
    )


def test_a_move_fills_one_seat_and_empties_another():
    assert RECOVERED.filled == {"W1_2", "W0_0"}
    assert RECOVERED.emptied == {"W0_1", "W2_0"}
    chain = Recovered(0, 1, 1, ("W2_0",), False, "", 0, moves=("W0_0>W1_0", "W1_0>W2_0"))
    assert (chain.filled, chain.emptied) == ({"W1_0", "W2_0"}, {"W0_0"})
    joined = Recovered(0, 1, 1, ("W2_0",), True, "", 0)
    assert (joined.filled, joined.emptied) == ({"W2_0"}, frozenset())


def test_a_summary_tells_a_recovery_in_steps_that_count_from_1():
    assert RECOVERED.to_json() == {
        "worker": "W1_2,W0_0",
        "workers": ["W1_2", "W0_0"],
        "joins": False,
        "cause": "it failed: no memory",
        "step": 5,
        "epoch": 3,
        "at_us": 5000,
        "lost_us": 21,
        "detect_us": 1,
        "abort_us": 2,
        "plan_us": 3,
        "regroup_us": 4,
        "transfer_us": 5,
        "redo_us": 6,
        "redone_ops": 7,
        "moves": ["W0_1>W1_2", "W2_0>W0_0"],
        "num_live": 10,
    }


def test_later_plans_are_found_by_the_iteration_from_which_they_were_gone_by(tmp_path):
    assert later_plans(tmp_path) == {}
    (tmp_path / "plans").mkdir()
    for name in (
        "from-iteration-10.json",
        "from-iteration-2.json",
        "from-iteration-x.json",
        "notes.txt",
        ".from-iteration-3.json.tmp",
    ):
        (tmp_path / "plans" / name).touch()
    found = later_plans(tmp_path)
    assert list(found) == [2, 10]
    assert found[10] == tmp_path / plan_file(10) == tmp_path / "plans" / "from-iteration-10.json"
