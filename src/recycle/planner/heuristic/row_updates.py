"""Compiled updates of a schedule that is given by the order of its rows: a small change costs only as much as it changes.

All ops are kept in a sequence in which each comes after those that it waits for. A move of an op in its row rearranges the part
of the sequence between its old place and its new one. Then times are computed again along the sequence, but only of ops whose
start depends on a change. Every change is written down, so that it can be taken back.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from recycle.planner.heuristic.list_scheduling_kernel import uncounted
from recycle.planner.heuristic.row_times import NEED_HERE, NEED_THERE, NEED_US, NEXT_HERE, NEXT_THERE, NEXT_US, STAGE, WORKER
from recycle.planner.model.assignment import Ints

Bytes = npt.NDArray[np.uint8]

# Columns of `counts`: how many ops are marked to be computed again, the first place of these in the sequence, how many starts
# are written down, and the part of the sequence that was rearranged.
_NUM_MARKED, _FIRST_MARKED, NUM_CHANGED, _PART_BEGIN, _PART_END, NUM_COUNTS = range(6)


class Rows(NamedTuple):
    """The rows of all workers with their times.

    `opens` is the time before which no op of a stage starts, `late` when each op may end at the latest if the schedule is not to
    get longer. `sequence` has all ops, each after those that it waits for, and `places` where each op is in it. `marks`, by place
    in the sequence, `changed`, `old_starts`, `old_sequence` and `counts` belong to the change in progress.
    """

    links: Ints
    lengths: Ints
    heads: Ints
    tails: Ints
    before: Ints
    after: Ints
    opens: Ints
    starts: Ints
    late: Ints
    sequence: Ints
    places: Ints
    marks: Bytes
    changed: Ints
    old_starts: Ints
    old_sequence: Ints
    counts: Ints


@uncounted
def begin_change(rows: Rows) -> None:
    counts = rows.counts
    counts[_NUM_MARKED], counts[_FIRST_MARKED], counts[NUM_CHANGED] = 0, rows.sequence.size, 0
    counts[_PART_BEGIN] = counts[_PART_END] = 0


@uncounted
def mark(rows: Rows, op: int) -> None:
    """Let the start of an op be computed again; nothing, if there is no such op."""
    if op < 0:
        return
    place = rows.places[op]
    if rows.marks[place] == 0:
        rows.marks[place] = 1
        rows.counts[_NUM_MARKED] += 1
        rows.counts[_FIRST_MARKED] = min(rows.counts[_FIRST_MARKED], place)


@uncounted
def mark_followers(rows: Rows, op: int) -> None:
    mark(rows, rows.after[op])
    mark(rows, rows.links[op, NEXT_HERE])
    mark(rows, rows.links[op, NEXT_THERE])


@uncounted
def relink(rows: Rows, op: int, to: int) -> None:
    """Take an op out of its row and put it back directly after `to`, or at the head of the row if that is negative."""
    heads, tails, before, after, worker = rows.heads, rows.tails, rows.before, rows.after, rows.links[op, WORKER]
    first, last = before[op], after[op]
    if first >= 0:
        after[first] = last
    else:
        heads[worker] = last
    if last >= 0:
        before[last] = first
    else:
        tails[worker] = first
    follower = after[to] if to >= 0 else heads[worker]
    before[op], after[op] = to, follower
    if to >= 0:
        after[to] = op
    else:
        heads[worker] = op
    if follower >= 0:
        before[follower] = op
    else:
        tails[worker] = op


@uncounted
def _is_marked(rows: Rows, op: int) -> bool:
    return op >= 0 and rows.marks[rows.places[op]] == 1


@uncounted
def _mark_part(rows: Rows, op: int, begin: int, end: int, is_later: bool) -> None:
    """Mark `op` and what waits for it between two places of the sequence; or, if it goes earlier, what it waits for."""
    rows.marks[rows.places[op]] = 1
    if is_later:
        for place in range(begin + 1, end):
            each = rows.sequence[place]
            here, there = rows.links[each, NEED_HERE], rows.links[each, NEED_THERE]
            if _is_marked(rows, rows.before[each]) or _is_marked(rows, here) or _is_marked(rows, there):
                rows.marks[place] = 1
    else:
        for place in range(end - 2, begin - 1, -1):
            each = rows.sequence[place]
            here, there = rows.links[each, NEXT_HERE], rows.links[each, NEXT_THERE]
            if _is_marked(rows, rows.after[each]) or _is_marked(rows, here) or _is_marked(rows, there):
                rows.marks[place] = 1


@uncounted
def _rearrange(rows: Rows, begin: int, end: int, marked_first: bool) -> None:
    """Put the marked ops of a part of the sequence before all others of it, or after them; unmark them."""
    sequence, old, places, at = rows.sequence, rows.old_sequence, rows.places, begin
    for place in range(begin, end):
        old[place] = sequence[place]
    for takes_marked in (marked_first, not marked_first):
        for place in range(begin, end):
            if (rows.marks[place] == 1) == takes_marked:
                sequence[at] = old[place]
                places[old[place]] = at
                at += 1
    for place in range(begin, end):
        rows.marks[place] = 0
    rows.counts[_PART_BEGIN], rows.counts[_PART_END] = begin, end


@uncounted
def move_op(rows: Rows, op: int, to: int) -> bool:
    """Put an op directly after `to` in its row, or at its head; False, and nothing has changed, if ops would wait in a circle.

    The first part of a change: nothing is marked yet.
    """
    places = rows.places
    is_later = to >= 0 and places[to] > places[op]
    other = to if is_later else rows.after[to] if to >= 0 else rows.heads[rows.links[op, WORKER]]
    begin, end = (places[op], places[to] + 1) if is_later else (places[other], places[op] + 1)
    follower, before = rows.after[op], rows.before[op]
    relink(rows, op, to)
    _mark_part(rows, op, begin, end, is_later)
    if rows.marks[places[other]] == 1:
        for place in range(begin, end):
            rows.marks[place] = 0
        relink(rows, op, before)
        return False
    _rearrange(rows, begin, end, not is_later)
    _renew_latest_ends(rows, follower if is_later else op, op if is_later else before)
    mark(rows, op)
    mark(rows, follower)
    mark(rows, rows.after[op])
    return True


@uncounted
def compute_starts(rows: Rows, margin: int) -> bool:
    """Compute the starts of the marked ops, and of all that depend on those that changed, and write down what they were.

    False, and only some of them are computed, if an op ends later than its latest end and `margin`.
    """
    starts, lengths, links, marks, place = rows.starts, rows.lengths, rows.links, rows.marks, rows.counts[_FIRST_MARKED]
    num_changed, is_late = 0, False
    while rows.counts[_NUM_MARKED] > 0:
        while marks[place] == 0:
            place += 1
        op = rows.sequence[place]
        marks[place] = 0
        rows.counts[_NUM_MARKED] -= 1
        if is_late:
            continue
        row, here, there = rows.before[op], links[op, NEED_HERE], links[op, NEED_THERE]
        start = starts[row] + lengths[row] if row >= 0 else rows.opens[links[op, STAGE]]
        if here >= 0:
            start = max(start, starts[here] + lengths[here])
        if there >= 0:
            start = max(start, starts[there] + lengths[there] + links[op, NEED_US])
        if start != starts[op]:
            rows.changed[num_changed], rows.old_starts[num_changed] = op, starts[op]
            num_changed += 1
            starts[op] = start
            is_late = start + lengths[op] > rows.late[op] + margin
            mark_followers(rows, op)
    rows.counts[NUM_CHANGED] = num_changed
    return not is_late


@uncounted
def _latest_end(rows: Rows, op: int, closes: int) -> int:
    """The latest end of an op by those of the ops that wait for it, or `closes` for the last one of a row."""
    links, late, lengths = rows.links, rows.late, rows.lengths
    row, here, there = rows.after[op], links[op, NEXT_HERE], links[op, NEXT_THERE]
    end = late[row] - lengths[row] if row >= 0 else closes
    if here >= 0:
        end = min(end, late[here] - lengths[here])
    if there >= 0:
        end = min(end, late[there] - lengths[there] - links[op, NEXT_US])
    return int(end)


@uncounted
def compute_latest_ends(rows: Rows, closes: Ints) -> None:
    """Compute when each op may end at the latest, if each stage has to end when it `closes`."""
    for place in range(rows.sequence.size - 1, -1, -1):
        op = rows.sequence[place]
        rows.late[op] = _latest_end(rows, op, closes[rows.links[op, STAGE]])


@uncounted
def _renew_latest_ends(rows: Rows, first: int, last: int) -> None:
    """Compute the latest ends of a part of a row again, after its order has changed.

    The others stay as they are: they only tell early that a change is a bad one.
    """
    op, closes = last, max(rows.late[first], rows.late[last])
    while True:
        rows.late[op] = _latest_end(rows, op, closes)
        if op == first:
            return
        op = rows.before[op]


@uncounted
def take_back(rows: Rows) -> None:
    """Restore the starts and the sequence as they were at `begin_change`."""
    for at in range(rows.counts[NUM_CHANGED]):
        rows.starts[rows.changed[at]] = rows.old_starts[at]
    for place in range(rows.counts[_PART_BEGIN], rows.counts[_PART_END]):
        op = rows.old_sequence[place]
        rows.sequence[place] = op
        rows.places[op] = place


@uncounted
def move_back(rows: Rows, op: int, to: int) -> None:
    """Put an op back directly after `to`, from where it was moved, when all else of the change is taken back."""
    before, follower = rows.before[op], rows.after[op]
    was_earlier = before >= 0 and rows.places[before] > rows.places[op]
    relink(rows, op, to)
    _renew_latest_ends(rows, op if was_earlier else follower, before if was_earlier else op)
