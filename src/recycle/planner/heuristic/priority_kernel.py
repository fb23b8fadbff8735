"""List scheduling by keys, in either direction of time: the compiled heart of `swing`.

Where `kernel.list_schedule` asks its dials, `keyed_schedule` starts whatever waiting op has the least key. Run backwards, a
worker begins with the W's that it will end with, gradients go down the stages and forwards come up, and a micro-batch takes its
place in memory with its W and gives it back with its F.
"""

import numpy as np

from recycle.planner.heuristic.list_scheduling_kernel import (
    CAPACITY,
    COMM_US,
    KEPT,
    TAKEN,
    F,
    I,
    W,
    _compiled,
    _pop,
    _push,
    _uncounted,
)
from recycle.planner.model.schedule import Ints

# Columns of the state, a row a worker (stage * D + pipeline): how many F's, I's and W's wait (where F, I, W point), what is held,
# whether it is busy, when the most pressing op that is on its way arrives and its key, where its queues begin.
_HELD, _BUSY, _NEXT_US, _NEXT_KEY, _FIRST, _NUM_STATE = range(3, 9)
_NONE = -1


@_compiled
def _empty_state(pipeline: Ints, num_pipelines: int) -> Ints:
    num_stages, num_chains = pipeline.shape
    state = np.zeros((num_stages * num_pipelines + 1, _NUM_STATE), np.int64)
    for stage in range(num_stages):
        for chain in range(num_chains):
            state[stage * num_pipelines + pipeline[stage, chain] + 1, _FIRST] += 1
    for worker in range(1, len(state)):
        state[worker, _FIRST] += state[worker - 1, _FIRST]
    return state


@_uncounted
def _follower_here(op: int, kind: int, is_last: bool, num_each: int, backwards: bool) -> int:
    """The op of the same chain and stage that waits for this one alone or last, or -1."""
    if backwards:
        return op - num_each if kind == W or (kind == I and is_last) else _NONE
    return op + num_each if kind == I or (kind == F and is_last) else _NONE


@_uncounted
def _follower_there(op: int, kind: int, stage: int, num_stages: int, num_chains: int, backwards: bool) -> int:
    """The op of the same chain at a neighbouring stage that waits for this one, or -1."""
    goes_down, goes_up = (I, F) if backwards else (F, I)
    if kind == goes_down and stage < num_stages - 1:
        return op + num_chains
    if kind == goes_up and stage > 0:
        return op - num_chains
    return _NONE


@_uncounted
def _offer(state: Ints, queues: Ints, key: Ints, worker: int, op: int) -> None:
    """Let an op, whose inputs have arrived, wait for its worker."""
    num_each = key.size // 3
    kind = op // num_each
    _push(queues, kind * num_each + state[worker, _FIRST], state[worker, kind], key[op] * key.size + op)
    state[worker, kind] += 1


@_uncounted
def _take(costs: Ints, state: Ints, queues: Ints, worker: int, stage: int, now: int, patience_us: int, backwards: bool) -> int:
    """Take the op that an idle worker starts now off its queue: the one with the least key, or none if a lesser is near."""
    best, least = _NONE, np.int64(1 << 62)
    takes_memory = W if backwards else F
    for kind in range(3):
        if state[worker, kind] == 0:
            continue
        if kind == takes_memory and state[worker, _HELD] + costs[stage, TAKEN] > costs[stage, CAPACITY]:
            continue
        first = queues[kind * (queues.size // 3) + state[worker, _FIRST]] // queues.size
        if first < least:
            best, least = kind, first
    if best == _NONE:
        return _NONE
    wait = state[worker, _NEXT_US] - now
    if 0 < wait <= patience_us and wait < costs[stage, best] and state[worker, _NEXT_KEY] < least:
        return _NONE
    op = _pop(queues, best * (queues.size // 3) + state[worker, _FIRST], state[worker, best]) % queues.size
    state[worker, best] -= 1
    state[worker, _BUSY] = 1
    if best == takes_memory:
        state[worker, _HELD] += costs[stage, TAKEN]
    return int(op)


@_uncounted
def _finish(costs: Ints, state: Ints, worker: int, stage: int, kind: int, backwards: bool) -> None:
    state[worker, _BUSY] = 0
    if backwards:
        # What I frees of the memory is taken with W already, so that no I ever waits for room.
        state[worker, _HELD] -= costs[stage, TAKEN] if kind == F else 0
    elif kind == I:
        state[worker, _HELD] -= costs[stage, TAKEN] - costs[stage, KEPT]
    elif kind == W:
        state[worker, _HELD] -= costs[stage, KEPT]


@_compiled
def _missing(num_stages: int, num_chains: int, backwards: bool) -> Ints:
    """How many ops each op still waits for. Forwards, F's of the first stage wait for none; backwards, W's."""
    missing = np.ones((3, num_stages, num_chains), np.int64)
    if backwards:
        missing[I, 1:] = 2
        missing[W] = 0
    else:
        missing[F, 0] = 0
    return missing.reshape(-1)


@_uncounted
def _settle(
    costs: Ints,
    state: Ints,
    queues: Ints,
    key: Ints,
    missing: Ints,
    shape: tuple[int, int],
    worker: int,
    code: int,
    backwards: bool,
) -> int:
    """Account for the end of an op or an arrival; return the op at a neighbouring stage that it leads to, or -1."""
    num_stages, num_chains = shape
    num_each = num_stages * num_chains
    ready, there = code - 3 * num_each, _NONE
    if ready < 0:
        kind, stage = code // num_each, code // num_chains % num_stages
        _finish(costs, state, worker, stage, kind, backwards)
        ready = _follower_here(code, kind, stage == num_stages - 1, num_each, backwards)
        there = _follower_there(code, kind, stage, num_stages, num_chains, backwards)
    if ready >= 0:
        missing[ready] -= 1
        if missing[ready] == 0:
            _offer(state, queues, key, worker, ready)
    return there


@_uncounted
def _announce(state: Ints, key: Ints, worker: int, op: int, arrival: int, now: int) -> None:
    """Let a worker know when an op that needs nothing else will arrive, if it knows of no more pressing one."""
    if state[worker, _NEXT_US] <= now or key[op] < state[worker, _NEXT_KEY]:
        state[worker, _NEXT_US] = arrival
        state[worker, _NEXT_KEY] = key[op]


@_compiled
def keyed_schedule(
    pipeline: Ints,
    costs: Ints,
    key: Ints,
    opens: Ints,
    patience: Ints,
    num_pipelines: int,
    backwards: bool,
    out: Ints,
    order: Ints,
) -> int:
    """Fill `out` with the start of each op, and `order` with the ops by start; returns how many could be placed.

    An op is (kind * S + stage) * N + chain. `opens` says when each stage may begin, `patience` for how long it waits for an op
    with a lesser key that is known to arrive. Backwards, keys that contradict each other can block memory for good.
    """
    num_stages, num_chains = pipeline.shape
    num_workers, num_each = num_stages * num_pipelines, num_stages * num_chains
    state = _empty_state(pipeline, num_pipelines)
    queues = np.empty(3 * num_each, np.int64)
    missing = _missing(num_stages, num_chains, backwards)
    # An event is time * base + code: the op that ends, or 3 * S * N more than the F or I that arrives.
    base = np.int64(5) * num_each
    events = np.empty(2 * num_each + num_workers, np.int64)
    doors = np.argsort(opens)
    num_events, num_open, num_ops = 0, 0, 0
    for op in range(3 * num_each):
        if missing[op] == 0:
            stage = op // num_chains % num_stages
            _offer(state, queues, key, stage * num_pipelines + pipeline[stage, op % num_chains], op)
    touched = np.empty(num_workers, np.int64)
    is_touched = np.zeros(num_workers, np.bool_)
    while num_events > 0 or num_open < num_stages:
        num_touched = 0
        now = events[0] // base if num_events > 0 else opens[doors[num_open]]
        if num_open < num_stages:
            now = min(now, opens[doors[num_open]])
        while num_open < num_stages and opens[doors[num_open]] == now:
            for worker in range(doors[num_open] * num_pipelines, (doors[num_open] + 1) * num_pipelines):
                is_touched[worker] = True
                touched[num_touched] = worker
                num_touched += 1
            num_open += 1
        while num_events > 0 and events[0] // base == now:
            code = _pop(events, 0, num_events) % base
            num_events -= 1
            stage = code // num_chains % num_stages
            worker = stage * num_pipelines + pipeline[stage, code % num_chains]
            there = _settle(costs, state, queues, key, missing, pipeline.shape, worker, code, backwards)
            if there >= 0:
                arrival = now + costs[min(stage, there // num_chains % num_stages), COMM_US]
                _push(events, 0, num_events, arrival * base + 3 * num_each + there)
                num_events += 1
            if not is_touched[worker]:
                is_touched[worker] = True
                touched[num_touched] = worker
                num_touched += 1
        for index in range(num_touched):
            worker = touched[index]
            is_touched[worker] = False
            stage = worker // num_pipelines
            if state[worker, _BUSY] or now < opens[stage]:
                continue
            op = _take(costs, state, queues, worker, stage, now, patience[stage], backwards)
            if op < 0:
                continue
            out[op] = now
            order[num_ops] = op
            num_ops += 1
            end = now + costs[stage, op // num_each]
            _push(events, 0, num_events, end * base + op)
            num_events += 1
            there = _follower_there(op, op // num_each, stage, num_stages, num_chains, backwards)
            if there >= 0 and missing[there] == 1:
                goes_to = there // num_chains % num_stages
                taker = goes_to * num_pipelines + pipeline[goes_to, there % num_chains]
                _announce(state, key, taker, there, end + costs[min(stage, goes_to), COMM_US], now)
    return num_ops
