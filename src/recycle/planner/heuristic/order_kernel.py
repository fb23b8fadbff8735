"""Compiled local search over the order of rows and over cuts: small changes of a schedule, each measured exactly.

A schedule is the order of every worker's ops and the cut of every chain. From these follow the times: every op as early as its
row and its needs allow, then shifted right and left as `justify` does. A step changes what the longest path to the end of a
critical worker goes through: an op moves in its row, or a layer of a chain goes from its worker to the worker of another stage.
Unlike a new list schedule, such a step leaves nearly everything as it was, so that many of them add up.

An op is a number: (kind * S + stage) * N + chain, for S stages and N chains.
"""

import numpy as np
import numpy.typing as npt

from recycle.planner.heuristic.list_scheduling_kernel import F, I, compiled, uncounted
from recycle.planner.model.assignment import Ints

Floats = npt.NDArray[np.float64]
_NONE = -1
# Columns of `links`, a row an op: the ops that it waits for and the ops that wait for it, besides its neighbours in the row, at
# its own stage (HERE) and at a neighbouring one (THERE), the time of the message between these, and what it belongs to.
_NEED_HERE, _NEED_THERE, _NEED_US, _NEXT_HERE, _NEXT_THERE, _NEXT_US, _STAGE, _CHAIN, _WORKER, _KIND, _NUM_LINKS = range(11)
# Norm in which the excess of workers over the bound is measured: high, so that the worst ones count most.
_NORM = 8
# Shares of the steps that shift a layer, and that change an end of a block; the others swap two ops.
_CUT_SHARE, _BLOCK_SHARE = 0.4, 0.3
_LONGEST_RUN = 8
# A step starts from the end of a worker that is at most so many microseconds better than the worst.
_NEARLY_US = 4


@compiled
def _links(pipeline: Ints, comm: Ints, num_pipelines: int) -> Ints:
    num_stages, num_chains = pipeline.shape
    num_each = num_stages * num_chains
    links = np.full((3 * num_each, _NUM_LINKS), _NONE)
    for op in range(3 * num_each):
        kind, stage, chain = op // num_each, op // num_chains % num_stages, op % num_chains
        links[op, _STAGE], links[op, _CHAIN], links[op, _KIND] = stage, chain, kind
        links[op, _WORKER] = stage * num_pipelines + pipeline[stage, chain]
        if kind != F:
            links[op, _NEED_HERE] = op - num_each
            links[op - num_each, _NEXT_HERE] = op
        neighbour = stage - 1 if kind == F else stage + 1
        if kind <= I and 0 <= neighbour < num_stages:
            there = op + (neighbour - stage) * num_chains
            links[op, _NEED_THERE], links[op, _NEED_US] = there, comm[min(stage, neighbour)]
            links[there, _NEXT_THERE], links[there, _NEXT_US] = op, comm[min(stage, neighbour)]
    return links


@uncounted
def _sort(links: Ints, before: Ints, after: Ints, missing: Ints, sequence: Ints) -> bool:
    """Fill `sequence` with all ops, each after those that it waits for; False if rows contradict the needs."""
    num_ops, size = before.size, 0
    for op in range(num_ops):
        missing[op] = (before[op] >= 0) + (links[op, _NEED_HERE] >= 0) + (links[op, _NEED_THERE] >= 0)
        if missing[op] == 0:
            sequence[size] = op
            size += 1
    at = 0
    while at < size:
        op = sequence[at]
        at += 1
        for follower in (after[op], links[op, _NEXT_HERE], links[op, _NEXT_THERE]):
            if follower >= 0:
                missing[follower] -= 1
                if missing[follower] == 0:
                    sequence[size] = follower
                    size += 1
    return size == num_ops


@uncounted
def _shift_left(links: Ints, lengths: Ints, before: Ints, sequence: Ints, opens: Ints, starts: Ints) -> None:
    for op in sequence:
        start = opens[links[op, _STAGE]]
        row, here, there = before[op], links[op, _NEED_HERE], links[op, _NEED_THERE]
        if row >= 0:
            start = max(start, starts[row] + lengths[row])
        if here >= 0:
            start = max(start, starts[here] + lengths[here])
        if there >= 0:
            start = max(start, starts[there] + lengths[there] + links[op, _NEED_US])
        starts[op] = start


@uncounted
def _shift_right(links: Ints, lengths: Ints, after: Ints, sequence: Ints, closes: Ints, starts: Ints) -> None:
    for index in range(sequence.size - 1, -1, -1):
        op = sequence[index]
        end = closes[links[op, _STAGE]]
        row, here, there = after[op], links[op, _NEXT_HERE], links[op, _NEXT_THERE]
        if row >= 0:
            end = min(end, starts[row])
        if here >= 0:
            end = min(end, starts[here])
        if there >= 0:
            end = min(end, starts[there] - links[op, _NEXT_US])
        starts[op] = end - lengths[op]


@compiled
def _retime(
    links: Ints, lengths: Ints, before: Ints, after: Ints, missing: Ints, sequence: Ints, opens: Ints, starts: Ints
) -> bool:
    """Compute the starts that follow from the rows; False if there are none. `opens` becomes the first start of each stage."""
    if not _sort(links, before, after, missing, sequence):
        return False
    num_ops = before.size
    opens[:] = 0
    _shift_left(links, lengths, before, sequence, opens, starts)
    closes = np.zeros(opens.size, np.int64)
    for op in range(num_ops // 3 * 2, num_ops):
        closes[links[op, _STAGE]] = max(closes[links[op, _STAGE]], starts[op] + lengths[op])
    _shift_right(links, lengths, after, sequence, closes, starts)
    opens[:] = 1 << 60
    for op in range(num_ops // 3):
        opens[links[op, _STAGE]] = min(opens[links[op, _STAGE]], starts[op])
    _shift_left(links, lengths, before, sequence, opens, starts)
    return True


@uncounted
def _set_costs(
    times: Ints,
    sizes: Ints,
    thousandths: Ints,
    pipeline: Ints,
    positions: Ints,
    stage: int,
    chain: int,
    lengths: Ints,
    held: Ints,
) -> None:
    """Write the lengths and the memory of a chain's ops at a stage, as its cuts have them."""
    num_stages, num_chains = pipeline.shape
    first, end, speed = positions[stage, chain], positions[stage + 1, chain], thousandths[stage, pipeline[stage, chain]]
    for kind in range(3):
        whole = max(1, times[kind, end] - times[kind, first])
        lengths[(kind * num_stages + stage) * num_chains + chain] = whole if speed == 1000 else -(-whole * 1000 // speed)
    held[0, stage, chain] = sizes[0, end] - sizes[0, first]
    held[1, stage, chain] = min(held[0, stage, chain], sizes[1, end] - sizes[1, first])


@uncounted
def _fits(links: Ints, capacity: int, head: int, after: Ints, held: Ints) -> bool:
    """Whether the row that begins with `head` never holds more than its worker's memory."""
    op, now = head, 0
    while op >= 0:
        kind, stage, chain = links[op, _KIND], links[op, _STAGE], links[op, _CHAIN]
        if kind == F:
            now += held[0, stage, chain]
            if now > capacity:
                return False
        elif kind == I:
            now -= held[0, stage, chain] - held[1, stage, chain]
        else:
            now -= held[1, stage, chain]
        op = after[op]
    return True


@uncounted
def _move(heads: Ints, before: Ints, after: Ints, worker: int, op: int, to: int) -> None:
    """Take an op out of its row and put it back directly after `to`, or at the head of the row."""
    first, last = before[op], after[op]
    if first >= 0:
        after[first] = last
    else:
        heads[worker] = last
    if last >= 0:
        before[last] = first
    follower = after[to] if to >= 0 else heads[worker]
    before[op], after[op] = to, follower
    if to >= 0:
        after[to] = op
    else:
        heads[worker] = op
    if follower >= 0:
        before[follower] = op


@uncounted
def _path(links: Ints, lengths: Ints, before: Ints, starts: Ints, op: int, choice: float, path: Ints) -> int:
    """Fill `path` with the ops that the end of `op` waits for, each directly for the next; return how many."""
    size = 0
    while op >= 0:
        path[size] = op
        size += 1
        row, here, there, found = before[op], links[op, _NEED_HERE], links[op, _NEED_THERE], _NONE
        if there >= 0 and starts[there] + lengths[there] + links[op, _NEED_US] == starts[op]:
            found = there
        if here >= 0 and starts[here] + lengths[here] == starts[op]:
            found = here
        if row >= 0 and starts[row] + lengths[row] == starts[op]:
            choice = choice * 7.0 % 1.0  # where the row and a need bind at once, one of the two paths is followed
            if found < 0 or choice < 0.5:
                found = row
        op = found
    return size


@uncounted
def _place(before: Ints, after: Ints, path: Ints, size: int, at: int, how: float) -> tuple[int, int]:
    """Choose an op of the block of `path[at]`, and after which op it goes: the first two or the last two swap, or one goes far.

    A block is a part of the path in one row. Only what changes an end of it can make the path shorter at once.
    """
    end, begin = at, at
    while end > 0 and after[path[end]] == path[end - 1]:
        end -= 1
    while begin + 1 < size and before[path[begin]] == path[begin + 1]:
        begin += 1
    if begin == end:
        return _NONE, _NONE
    if how < 0.25:
        return path[begin], path[begin - 1]
    if how < 0.5:
        return path[end], before[path[end + 1]]
    if how < 0.75:
        return path[at], path[end]
    return path[at], before[path[begin]]


@compiled
def _measure(
    links: Ints,
    positions: Ints,
    finish: Ints,
    layer_finish: Ints,
    is_staggered: bool,
    bound: int,
    lengths: Ints,
    starts: Ints,
    opens: Ints,
    spans: Ints,
) -> tuple[int, float]:
    """Fill `spans`; return the period, and how far workers and shared layers exceed the bound, the worst most of all."""
    num_each = starts.size // 3
    first, period, total = opens.min(), np.int64(0), 0.0
    firsts, lasts = np.full(layer_finish.size, np.int64(1) << 60), np.full(layer_finish.size, -(np.int64(1) << 60))
    spans[:] = 0
    for op in range(num_each):
        stage, chain, worker = links[op, _STAGE], links[op, _CHAIN], links[op, _WORKER]
        end = starts[op + 2 * num_each] + lengths[op + 2 * num_each]
        spans[worker] = max(spans[worker], end - (opens[stage] if is_staggered else first) + finish[stage])
        if layer_finish.size:
            for layer in range(positions[stage, chain], positions[stage + 1, chain]):
                firsts[layer] = min(firsts[layer], starts[op])
                lasts[layer] = max(lasts[layer], end)
    for span in spans:
        period = max(period, span)
        total += max(0.0, float(span - bound)) ** _NORM
    for layer in range(layer_finish.size):
        if layer_finish[layer] >= 0:
            span = lasts[layer] - firsts[layer] + layer_finish[layer]
            period = max(period, span)
            total += max(0.0, float(span - bound)) ** _NORM
    return int(period), float((total / spans.size) ** (1 / _NORM))


@uncounted
def _a_late_worker(spans: Ints, nearly: float, choice: float) -> int:
    """A worker whose span is the longest, or nearly."""
    longest = np.int64(0)
    for span in spans:
        longest = max(longest, span)
    least, num = longest - int(_NEARLY_US * nearly), 0
    for span in spans:
        num += span >= least
    skipped = int(choice * num)
    for worker in range(spans.size):
        if spans[worker] >= least:
            if skipped == 0:
                return worker
            skipped -= 1
    return 0


@compiled
def improve_orders(
    pipeline: Ints,
    comm: Ints,
    finish: Ints,
    layer_finish: Ints,
    capacity: Ints,
    times: Ints,
    sizes: Ints,
    thousandths: Ints,
    lows: Ints,
    highs: Ints,
    is_staggered: bool,
    bound: int,
    warmth: float,
    randoms: Floats,
    positions: Ints,
    starts: Ints,
) -> int:
    """Improve a schedule by one step for each row of `randoms`; fill `positions` and `starts` with the best, return its period.

    `positions` are the layers at which chains are cut, by boundary and chain; `lows` and `highs` limit them. `times` and `sizes`
    are sums over the layers of the times of F, I and W, and of the memory that F takes and that stays until W. `layer_finish` is
    -1 for layers of one stage. A step that makes the schedule worse is taken with a probability that `warmth` sets.
    """
    num_pipelines = thousandths.shape[1]
    num_stages, num_chains = pipeline.shape
    num_ops, num_workers = 3 * num_stages * num_chains, num_stages * num_pipelines
    links = _links(pipeline, comm, num_pipelines)
    lengths, held = np.zeros(num_ops, np.int64), np.zeros((2, num_stages, num_chains), np.int64)
    for stage in range(num_stages):
        for chain in range(num_chains):
            _set_costs(times, sizes, thousandths, pipeline, positions, stage, chain, lengths, held)
    heads, tails = np.full(num_workers, _NONE), np.full(num_workers, _NONE)
    before, after = np.full(num_ops, _NONE), np.full(num_ops, _NONE)
    for op in np.argsort(starts.reshape(-1)):  # every op takes time, so that no two of a row start at once
        worker = links[op, _WORKER]
        before[op] = tails[worker]
        if tails[worker] >= 0:
            after[tails[worker]] = op
        else:
            heads[worker] = op
        tails[worker] = op
    missing, sequence, path = np.zeros(num_ops, np.int64), np.zeros(num_ops, np.int64), np.zeros(num_ops, np.int64)
    opens, spans, trial_spans = np.zeros(num_stages, np.int64), np.zeros(num_workers, np.int64), np.zeros(num_workers, np.int64)
    now, trial = np.zeros(num_ops, np.int64), np.zeros(num_ops, np.int64)
    _retime(links, lengths, before, after, missing, sequence, opens, now)
    period, energy = _measure(links, positions, finish, layer_finish, is_staggered, bound, lengths, now, opens, spans)
    best, best_energy, best_starts, best_positions = period, energy, now.copy(), positions.copy()
    for step in range(randoms.shape[0]):
        which, pick, how, far, accept, choice = randoms[step]
        op = heads[_a_late_worker(spans, how, choice)]
        while after[op] >= 0:
            op = after[op]
        size = _path(links, lengths, before, now, op, choice, path)
        at = int(pick * size)
        op = path[at]
        stage, chain = links[op, _STAGE], links[op, _CHAIN]
        is_cut, is_legal = which < _CUT_SHARE, True
        first, last, shift, was_after = 0, 0, 0, before[op]
        if is_cut:
            # The layer goes from `stage` to a stage before or after it: all boundaries between them shift.
            reach = 1 + int(far * min(_LONGEST_RUN, stage if how < 0.5 else num_stages - 1 - stage))
            first, last, shift = (stage - reach + 1, stage, 1) if how < 0.5 else (stage + 1, stage + reach, -1)
            if first < 1 or last > num_stages - 1:
                continue
            for boundary in range(first, last + 1):
                positions[boundary, chain] += shift
                is_legal &= lows[boundary] <= positions[boundary, chain] <= highs[boundary]
            for each in range(first - 1, last + 1):
                is_legal &= positions[each + 1, chain] > positions[each, chain]
            if is_legal:
                for each in range(first - 1, last + 1):
                    _set_costs(times, sizes, thousandths, pipeline, positions, each, chain, lengths, held)
                    row = heads[each * num_pipelines + pipeline[each, chain]]
                    is_legal = is_legal and _fits(links, capacity[each], row, after, held)
        else:
            to = after[op]
            if which < _CUT_SHARE + _BLOCK_SHARE:
                op, to = _place(before, after, path, size, at, how)
            if op < 0 or to == op or to == before[op] or (to < 0 and before[op] < 0):
                continue
            if to < 0 and after[op] < 0:
                continue
            was_after = before[op]
            _move(heads, before, after, links[op, _WORKER], op, to)
            is_legal = _fits(links, capacity[links[op, _STAGE]], heads[links[op, _WORKER]], after, held)
        if is_legal and _retime(links, lengths, before, after, missing, sequence, opens, trial):
            trial_period, trial_energy = _measure(
                links, positions, finish, layer_finish, is_staggered, bound, lengths, trial, opens, trial_spans
            )
            if trial_energy <= energy - warmth * np.log(max(accept, 1e-12)):
                period, energy = trial_period, trial_energy
                now, trial, spans, trial_spans = trial, now, trial_spans, spans
                if period < best or (period == best and energy < best_energy):
                    best, best_energy = period, energy
                    best_starts[:] = now
                    best_positions[:] = positions
                continue
        if is_cut:
            for boundary in range(first, last + 1):
                positions[boundary, chain] -= shift
            for each in range(first - 1, last + 1):
                _set_costs(times, sizes, thousandths, pipeline, positions, each, chain, lengths, held)
        else:
            _move(heads, before, after, links[op, _WORKER], op, was_after)
    starts[:] = best_starts.reshape(starts.shape)
    positions[:] = best_positions
    return int(best)
