"""Traces of nodes that join and leave, and the trace file."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle.core.errors import FileProblem, UserError
from recycle.core.events.trace import Change, Slowdown, Trace, live_counts

TEXT = """\
# two nodes, one of which is away for a minute
0,add,W0_0
0,add,W0_1
60000,remove,W0_1
120000,add,W0_1
# end 180000
"""


@st.composite
def traces(draw):
    """Nodes that come and go at random, each only where it can."""
    names = draw(st.lists(st.text("abcé #-", min_size=1).filter(lambda name: name == name.strip()), min_size=1, unique=True))
    steps = draw(st.lists(st.tuples(st.integers(0, 5000), st.sampled_from(names), st.booleans())))
    at_ms, present, changes = 0, {names[0]}, [Change(0, True, names[0])]
    for wait_ms, name, hangs in steps:
        at_ms += wait_ms
        changes.append(Change(at_ms * 1000, name not in present, name, hangs and name in present))
        present ^= {name}
    return Trace(tuple(changes), (at_ms + draw(st.integers(1, 5000))) * 1000)


def test_a_trace_is_read_line_by_line():
    trace = Trace.parse(TEXT)
    assert trace.initial == ("W0_0", "W0_1")
    assert trace.later == (Change(60_000_000, False, "W0_1"), Change(120_000_000, True, "W0_1"))
    assert trace.end_us == 180_000_000
    assert trace.num_failures == 1


def test_a_trace_without_an_end_ends_with_its_last_change():
    assert Trace.parse("0,add,a\n7,remove,a\n").end_us == 7000


def test_spaces_blank_lines_and_comments_do_not_matter():
    assert Trace.parse(" 0 , add , a \r\n\r\n  # a remark\n5,remove,a") == Trace.parse("0,add,a\n5,remove,a\n")


def test_a_node_that_hangs_leaves():
    trace = Trace.parse("0,add,a\n0,add,b\n5,hang,a\n# end 10")
    assert trace.later == (Change(5000, False, "a", hangs=True),)
    assert (trace.num_failures, trace.num_hangs) == (1, 1)


def test_a_node_cannot_hang_as_it_joins():
    with pytest.raises(UserError, match="a node hangs when it leaves"):
        Trace((Change(0, True, "a", hangs=True),), 1000)


@given(traces())
def test_a_trace_is_read_back_as_it_was_written(trace):
    assert Trace.parse(trace.dumps(["made up"])) == trace


@given(traces())
def test_those_at_the_start_and_the_later_changes_tell_the_whole_story(trace):
    present = set(trace.initial)
    assert len(trace.initial) == len(present) == next(live_counts(trace))[1]
    for change in trace.later:
        assert change.at_us > 0
        assert change.joins == (change.node not in present)
        present ^= {change.node}
    assert len(present) == list(live_counts(trace))[-1][1]


@given(traces())
def test_live_counts_follow_the_changes(trace):
    counts = dict(live_counts(trace))
    assert list(counts) == sorted({change.at_us for change in trace.changes})
    for at_us, count in counts.items():
        last = {change.node: change.joins for change in trace.changes if change.at_us <= at_us}
        assert count == sum(last.values())


def test_changes_at_one_time_count_as_one():
    trace = Trace.parse("0,add,a\n0,add,b\n5,remove,a\n5,add,c\n5,add,d\n9,remove,b\n# end 10")
    assert list(live_counts(trace)) == [(0, 2), (5000, 3), (9000, 2)]


def test_what_happens_at_the_start_is_done_before_it():
    trace = Trace.parse("0,add,a\n0,add,b\n0,add,c\n0,remove,a\n0,remove,b\n0,add,a\n9,remove,a\n# end 10")
    assert set(trace.initial) == {"a", "c"}
    assert trace.later == (Change(9000, False, "a"),)
    assert trace.num_failures == 1
    assert list(live_counts(trace)) == [(0, 2), (9000, 1)]


def test_nobody_is_live_until_the_first_node_joins(tmp_path):
    path = tmp_path / "late.csv"
    path.write_text("5,add,a\n5,add,b\n7,remove,a\n# end 10")
    trace = Trace.load(path)
    assert trace.initial == ()
    assert trace.later == trace.changes
    assert list(live_counts(trace)) == [(0, 0), (5000, 2), (7000, 1)]
    assert Trace.parse(trace.dumps()) == trace
    with pytest.raises(UserError, match="the trace has no node"):
        trace.until(4000)


def test_a_trace_can_be_cut_and_stretched():
    trace = Trace.parse(TEXT)
    assert trace.until(60_000_000).later == (Change(60_000_000, False, "W0_1"),)
    assert trace.until(59_999_000).later == ()
    assert trace.until(10**12) == Trace(trace.changes, 10**12)


def test_a_saved_trace_begins_with_its_comments(tmp_path):
    Trace.parse(TEXT).save(tmp_path / "trace.csv", ["from a cluster", "of two"])
    lines = (tmp_path / "trace.csv").read_text().splitlines()
    assert lines[:3] == ["# from a cluster", "# of two", "0,add,W0_0"]
    assert lines[-1] == "# end 180000"
    assert Trace.load(tmp_path / "trace.csv") == Trace.parse(TEXT)


WRONG = {
    "nothing": ("", r"has no node: give the nodes that are there from the start as lines '0,add,NODE'"),
    "only comments": ("# nothing\n# end 5", r"has no node: give"),
    "a first node leaves": ("5,remove,a", r"a is removed, but it is not there at 5 ms"),
    "out of order": ("0,add,a\n9,remove,a\n5,add,a", r"a changes at 5 ms, after a change at 9 ms: sort the trace by time"),
    "an absent node leaves": ("0,add,a\n5,remove,b", r"b is removed, but it is not there at 5 ms"),
    "a node leaves twice": ("0,add,a\n5,remove,a\n6,remove,a", r"a is removed, but it is not there at 6 ms"),
    "a present node joins": ("0,add,a\n5,add,a", r"a is added, but it is there already at 5 ms"),
    "ends before its last change": ("0,add,a\n5,remove,a\n# end 4", r"ends at 4 ms, before its last change at 5 ms"),
    "no time at all": ("0,add,a", r"ends at 0 ms, so there is no time to look at: add '# end MILLISECONDS'"),
    "an unknown word": (
        "0,add,a\n5,dies,a",
        r"line 2 is '5,dies,a', but a change is written milliseconds,add\|remove\|hang,node",
    ),
    "two parts": ("0,add", r"line 1 is '0,add', but a change is written"),
    "four parts": ("0,add,a,b", r"line 1 is '0,add,a,b', but a change is written"),
    "no name": ("0,add, ", r"line 1 is '0,add,', but a change is written"),
    "a negative time": ("-5,add,a", r"line 1 gives the time '-5', but it is a whole number of milliseconds from 0"),
    "half a millisecond": ("0,add,a\n0.5,remove,a", r"line 2 gives the time '0.5'"),
    "not a number": ("nan,add,a", r"line 1 gives the time 'nan'"),
    "an absurd time": ("0,add,a\n1000000000001,remove,a", r"line 2 gives the time '1000000000001'.* to 1000000000000"),
    "more digits than Python reads": (f"{'9' * 5000},add,a", r"line 1 gives the time '9+\.\.\.9+', but it is a whole number"),
    "an end that is no time": ("0,add,a\n# end soon", r"line 2 gives the time 'soon'"),
    "JSON": ('{"format": "recycle-plan"}', r"line 1 is '\{\"format\": .*', but a change is written"),
}


@pytest.mark.parametrize(("text", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_a_text_that_is_no_trace_is_explained_with_its_file(text, sentence, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(FileProblem, match=f"^{re.escape(str(path))} is not a usable trace: .*{sentence}") as caught:
        Trace.load(path)
    assert len(str(caught.value)) < len(str(path)) + 250


def test_a_file_that_cannot_be_read_is_explained(tmp_path):
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    with pytest.raises(FileProblem, match="is not text: a trace has a line"):
        Trace.load(tmp_path / "binary")
    with pytest.raises(FileProblem, match=r"cannot read .*: Is a directory"):
        Trace.load(tmp_path)
    with pytest.raises(FileProblem, match=r"cannot read .*: No such file"):
        Trace.load(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["", "a,b", "a\nb", " a", "a ", "a\u2028b", "a\r"])
def test_a_name_that_could_not_be_read_back_is_refused(name):
    with pytest.raises(UserError, match="is not the name of a node"):
        Trace((Change(0, True, name),), 1000)


def test_a_trace_longer_than_can_be_read_back_is_refused():
    with pytest.raises(UserError, match=r"after the 1000000000000 ms \(30 years\) that one may last"):
        Trace((Change(0, True, "a"),), 10**15 + 1000)


def test_what_leaves_at_one_time_is_one_outage():
    trace = Trace.parse("0,add,a\n0,add,b\n0,add,c\n5,remove,a\n5,remove,b\n9,remove,c\n# end 20")
    assert (trace.num_failures, trace.num_outages) == (3, 2)


SLOW_TEXT = """\
0,add,W0_0
0,add,W0_1
5000,slow,W0_1,0.6,15000
7000,slow-link,W0_0,0.25,9000
60000,remove,W0_1
# end 180000
"""


def test_slow_nodes_and_links_are_read_and_written():
    trace = Trace.parse(SLOW_TEXT)
    assert trace.slowdowns == (
        Slowdown(5_000_000, 15_000_000, "W0_1", 0.6),
        Slowdown(7_000_000, 9_000_000, "W0_0", 0.25, is_link=True),
    )
    assert trace.num_failures == 1
    assert trace.dumps() == SLOW_TEXT
    assert Trace.parse(trace.dumps()) == trace


def test_a_trace_without_slow_nodes_is_written_as_before():
    trace = Trace.parse(TEXT)
    assert trace.slowdowns == ()
    assert "slow" not in trace.dumps()


def test_a_trace_that_is_cut_keeps_the_slowdowns_that_begin_before():
    assert len(Trace.parse(SLOW_TEXT).until(6_000_000).slowdowns) == 1
    assert Trace.parse("0,add,a\n5,slow,a,0.5,9").end_us == 9000


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("5000,slow,W0_1,fast,15000", "line 3 gives the speed 'fast'"),
        ("5000,slow,W0_1,1.5,15000", "has the speed 1.5, but it is a number from 0.001 to 1"),
        ("5000,slow,W0_1,0.5,5000", "slow from 5000 to 5000 ms: it ends after it begins"),
        ("5000,slow,W7_7,0.5,6000", "'W7_7' is slow, but it is never added"),
        ("5000,slow,W0_1,0.5", "a slowdown like 600000,slow,W1_2,0.6,1200000"),
        ("900000,slow,W0_1,0.5,1000000", "after the end of the trace"),
    ],
)
def test_a_slowdown_that_cannot_be_is_refused(line, problem):
    with pytest.raises(UserError, match=re.escape(problem)):
        Trace.parse(f"0,add,W0_0\n0,add,W0_1\n{line}\n# end 180000")


def test_slowdowns_are_merged_in_order_of_time():
    trace = Trace.parse(SLOW_TEXT).with_slowdowns([Slowdown(6_000_000, 8_000_000, "W0_0", 0.9)])
    assert [slow.start_us // 1_000_000 for slow in trace.slowdowns] == [5, 6, 7]
    with pytest.raises(UserError, match="sort the trace by time"):
        Trace(trace.changes, trace.end_us, trace.slowdowns[::-1])
