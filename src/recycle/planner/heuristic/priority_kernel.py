"""Compiled list scheduling by given priorities, forward or backward in time: one pass of forward-backward improvement.

Where `list_schedule` follows its priority rule, `priority_schedule` starts the waiting op with the lowest priority value. In a
backward pass a worker begins with the W's that will end its row, gradients go down the stages and forwards come up, and a
micro-batch takes its memory with its W and gives it back with its F.

An op is a number: (kind * S + stage) * N + chain, for S stages and N chains.
"""

from typing import NamedTuple

import numpy as np

from recycle.planner.heuristic.list_scheduling_kernel import (
    CAPACITY,
    COMM_US,
    KEPT,
    TAKEN,
    F,
    I,
    W,
    compiled,
    heap_pop,
    heap_push,
    uncounted,
)
from recycle.planner.model.schedule import Bools, Ints

# Columns of the state, a row a worker (stage * D + pipeline): how many F's, I's and W's wait (where F, I, W point), memory held,
# whether it is busy, when the most urgent op that is on its way arrives and its priority, where its queues begin.
_HELD, _BUSY, _NEXT_US, _NEXT_PRIORITY, _FIRST, _NUM_STATE = range(3, 9)
# The counters of a pass: events in the heap, ops placed, touched workers.
_EVENTS, _PLACED, _TOUCHED = range(3)
_NONE = -1


class _Given(NamedTuple):
    """The input of a pass."""

    pipeline: Ints  # [stage, chain]: the pipeline that runs the chain there
    costs: Ints  # [stage, column]
    priority: Ints  # [op]: the lowest value goes first
    release_us: Ints  # [stage]: the earliest start of any op
    patience_us: Ints  # [stage]: how long a worker waits for an op with a lower priority value that is known to arrive
    num_pipelines: int
    backwards: bool


class _Pass(NamedTuple):
    """The arrays that a pass changes while it runs."""

    state: Ints
    queues: Ints  # for each kind and worker a heap of priority * number of ops + op
    missing: Ints  # [op]: how many ops it still waits for
    events: Ints  # a heap of time * base + code; the code is the op that ends, or 3 * S * N more than the F or I that arrives
    touched: Ints  # the workers that may start an op now
    is_touched: Bools
    counts: Ints


@compiled
def _empty_state(pipeline: Ints, num_pipelines: int) -> Ints:
    num_stages, num_chains = pipeline.shape
    state = np.zeros((num_stages * num_pipelines + 1, _NUM_STATE), np.int64)
    for stage in range(num_stages):
        for chain in range(num_chains):
            state[stage * num_pipelines + pipeline[stage, chain] + 1, _FIRST] += 1
    for worker in range(1, len(state)):
        state[worker, _FIRST] += state[worker - 1, _FIRST]
    return state


@uncounted
def _follower_here(op: int, kind: int, is_last: bool, num_each: int, backwards: bool) -> int:
    """The op of the same chain and stage that waits for this one alone or last, or -1."""
    if backwards:
        return op - num_each if kind == W or (kind == I and is_last) else _NONE
    return op + num_each if kind == I or (kind == F and is_last) else _NONE


@uncounted
def _follower_there(op: int, kind: int, stage: int, num_stages: int, num_chains: int, backwards: bool) -> int:
    """The op of the same chain at a neighbouring stage that waits for this one, or -1."""
    goes_down, goes_up = (I, F) if backwards else (F, I)
    if kind == goes_down and stage < num_stages - 1:
        return op + num_chains
    if kind == goes_up and stage > 0:
        return op - num_chains
    return _NONE


@uncounted
def _offer(state: Ints, queues: Ints, priority: Ints, worker: int, op: int) -> None:
    """Put an op, whose inputs have arrived, into the queue of its worker."""
    num_each = priority.size // 3
    kind = op // num_each
    heap_push(queues, kind * num_each + state[worker, _FIRST], state[worker, kind], priority[op] * priority.size + op)
    state[worker, kind] += 1


@uncounted
def _take(costs: Ints, state: Ints, queues: Ints, worker: int, stage: int, now: int, patience_us: int, backwards: bool) -> int:
    """Take the op that an idle worker starts now off its queue: the most urgent, or none if a more urgent one arrives soon."""
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
    if 0 < wait <= patience_us and wait < costs[stage, best] and state[worker, _NEXT_PRIORITY] < least:
        return _NONE
    op = heap_pop(queues, best * (queues.size // 3) + state[worker, _FIRST], state[worker, best]) % queues.size
    state[worker, best] -= 1
    state[worker, _BUSY] = 1
    if best == takes_memory:
        state[worker, _HELD] += costs[stage, TAKEN]
    return int(op)


@uncounted
def _finish(costs: Ints, state: Ints, worker: int, stage: int, kind: int, backwards: bool) -> None:
    state[worker, _BUSY] = 0
    if backwards:
        # The memory that I frees was taken with W already, so that no I ever waits for memory.
        state[worker, _HELD] -= costs[stage, TAKEN] if kind == F else 0
    elif kind == I:
        state[worker, _HELD] -= costs[stage, TAKEN] - costs[stage, KEPT]
    elif kind == W:
        state[worker, _HELD] -= costs[stage, KEPT]


@compiled
def _missing(num_stages: int, num_chains: int, backwards: bool) -> Ints:
    """How many ops each op waits for. In a forward pass, F's of the first stage wait for none; in a backward one, W's."""
    missing = np.ones((3, num_stages, num_chains), np.int64)
    if backwards:
        missing[I, 1:] = 2
        missing[W] = 0
    else:
        missing[F, 0] = 0
    return missing.reshape(-1)


@uncounted
def _settle(given: _Given, run: _Pass, worker: int, code: int) -> int:
    """Account for the end of an op or an arrival; return the op at a neighbouring stage that it leads to, or -1."""
    num_stages, num_chains = given.pipeline.shape
    num_each = num_stages * num_chains
    ready, there = code - 3 * num_each, _NONE
    if ready < 0:
        kind, stage = code // num_each, code // num_chains % num_stages
        _finish(given.costs, run.state, worker, stage, kind, given.backwards)
        ready = _follower_here(code, kind, stage == num_stages - 1, num_each, given.backwards)
        there = _follower_there(code, kind, stage, num_stages, num_chains, given.backwards)
    if ready >= 0:
        run.missing[ready] -= 1
        if run.missing[ready] == 0:
            _offer(run.state, run.queues, given.priority, worker, ready)
    return there


@uncounted
def _announce(state: Ints, priority: Ints, worker: int, op: int, arrival: int, now: int) -> None:
    """Let a worker know when an op that needs nothing else will arrive, if it knows of no more urgent one."""
    if state[worker, _NEXT_US] <= now or priority[op] < state[worker, _NEXT_PRIORITY]:
        state[worker, _NEXT_US] = arrival
        state[worker, _NEXT_PRIORITY] = priority[op]


@uncounted
def _touch(run: _Pass, worker: int) -> None:
    if not run.is_touched[worker]:
        run.is_touched[worker] = True
        run.touched[run.counts[_TOUCHED]] = worker
        run.counts[_TOUCHED] += 1


@uncounted
def _add_event(run: _Pass, time_us: int, code: int) -> None:
    base = run.queues.size // 3 * 5
    heap_push(run.events, 0, run.counts[_EVENTS], time_us * base + code)
    run.counts[_EVENTS] += 1


@uncounted
def _process_events(given: _Given, run: _Pass, now: int) -> None:
    """Process the ends and arrivals of the time `now`."""
    num_stages, num_chains = given.pipeline.shape
    num_ops = 3 * num_stages * num_chains
    base = num_ops // 3 * 5
    while run.counts[_EVENTS] > 0 and run.events[0] // base == now:
        code = heap_pop(run.events, 0, run.counts[_EVENTS]) % base
        run.counts[_EVENTS] -= 1
        stage = code // num_chains % num_stages
        worker = stage * given.num_pipelines + given.pipeline[stage, code % num_chains]
        there = _settle(given, run, worker, code)
        if there >= 0:
            _add_event(run, now + given.costs[min(stage, there // num_chains % num_stages), COMM_US], num_ops + there)
        _touch(run, worker)


@uncounted
def _start_ops(given: _Given, run: _Pass, now: int, out: Ints, order: Ints) -> None:
    """Let each touched worker that is idle start an op at the time `now`."""
    num_stages, num_chains = given.pipeline.shape
    for index in range(run.counts[_TOUCHED]):
        worker = run.touched[index]
        run.is_touched[worker] = False
        stage = worker // given.num_pipelines
        if run.state[worker, _BUSY] or now < given.release_us[stage]:
            continue
        op = _take(given.costs, run.state, run.queues, worker, stage, now, given.patience_us[stage], given.backwards)
        if op < 0:
            continue
        out[op] = now
        order[run.counts[_PLACED]] = op
        run.counts[_PLACED] += 1
        kind = op // (num_stages * num_chains)
        end = now + given.costs[stage, kind]
        _add_event(run, end, op)
        there = _follower_there(op, kind, stage, num_stages, num_chains, given.backwards)
        if there >= 0 and run.missing[there] == 1:
            goes_to = there // num_chains % num_stages
            taker = goes_to * given.num_pipelines + given.pipeline[goes_to, there % num_chains]
            _announce(run.state, given.priority, taker, there, end + given.costs[min(stage, goes_to), COMM_US], now)
    run.counts[_TOUCHED] = 0


@compiled
def priority_schedule(
    pipeline: Ints,
    costs: Ints,
    priority: Ints,
    release_us: Ints,
    patience_us: Ints,
    num_pipelines: int,
    backwards: bool,
    out: Ints,
    order: Ints,
) -> int:
    """Fill `out` with the start of each op, and `order` with the ops by start; returns how many could be placed.

    `_Given` explains the input. In a backward pass, priorities that contradict each other can block memory for good.
    """
    num_stages, num_chains = pipeline.shape
    num_workers, num_each = num_stages * num_pipelines, num_stages * num_chains
    given = _Given(pipeline, costs, priority, release_us, patience_us, num_pipelines, backwards)
    run = _Pass(
        _empty_state(pipeline, num_pipelines),
        np.empty(3 * num_each, np.int64),
        _missing(num_stages, num_chains, backwards),
        np.empty(2 * num_each + num_workers, np.int64),
        np.empty(num_workers, np.int64),
        np.zeros(num_workers, np.bool_),
        np.zeros(3, np.int64),
    )
    for op in range(3 * num_each):
        if run.missing[op] == 0:
            stage = op // num_chains % num_stages
            _offer(run.state, run.queues, priority, stage * num_pipelines + pipeline[stage, op % num_chains], op)
    by_release = np.argsort(release_us)
    num_released = 0
    while run.counts[_EVENTS] > 0 or num_released < num_stages:
        now = run.events[0] // (5 * num_each) if run.counts[_EVENTS] > 0 else release_us[by_release[num_released]]
        if num_released < num_stages:
            now = min(now, release_us[by_release[num_released]])
        while num_released < num_stages and release_us[by_release[num_released]] == now:
            for pipeline_number in range(num_pipelines):
                _touch(run, by_release[num_released] * num_pipelines + pipeline_number)
            num_released += 1
        _process_events(given, run, now)
        _start_ops(given, run, now, out, order)
    return int(run.counts[_PLACED])
