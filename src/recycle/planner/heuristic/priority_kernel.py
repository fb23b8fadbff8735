"""Compiled list scheduling by given priorities, forward or backward in time: one pass of forward-backward improvement.

Where `list_schedule` follows its priority rule, `priority_schedule` starts the waiting op with the lowest priority value. In a
backward pass a worker begins with the W's that will end its row, gradients go down the stages and forwards come up, and a
micro-batch takes its memory with its W and gives it back with its F.

An op is a number: (kind * S + stage) * N + chain, for S stages and N chains.
"""

import numpy as np

from recycle.planner.heuristic.list_scheduling_kernel import (
    BUSY,
    COMM_US,
    FIRST,
    HELD,
    NUM_SHARED,
    TAKEN,
    F,
    I,
    W,
    compiled,
    cost,
    empty_state,
    finish,
    first_chain,
    follower_there,
    forward_fits,
    heap_pop,
    heap_push,
    offer,
    take,
    touch,
    uncounted,
)
from recycle.planner.model.assignment import Ints

# Columns of the state beside those of both kernels: when the most urgent op that is on its way arrives, and its priority.
_NEXT_US, _NEXT_PRIORITY, _NUM_STATE = range(NUM_SHARED, NUM_SHARED + 3)
_NONE = -1


@uncounted
def _follower_here(op: int, kind: int, is_last: bool, num_each: int, backwards: bool) -> int:
    """The op of the same chain and stage that waits for this one alone or last, or -1."""
    if backwards:
        return op - num_each if kind == W or (kind == I and is_last) else _NONE
    return op + num_each if kind == I or (kind == F and is_last) else _NONE


@uncounted
def _offer(state: Ints, queues: Ints, priority: Ints, worker: int, op: int) -> None:
    """Put an op, whose inputs have arrived, into the queue of its worker."""
    offer(state, queues, worker, op // (priority.size // 3), priority[op] * priority.size + op)


@uncounted
def _take(
    work: Ints, costs: Ints, state: Ints, queues: Ints, worker: int, stage: int, now: int, patience_us: int, backwards: bool
) -> int:
    """Take the op that an idle worker starts now off its queue: the most urgent, or none if a more urgent one arrives soon."""
    best, least = _NONE, np.int64(1 << 62)
    takes_memory = W if backwards else F
    for kind in range(3):
        if state[worker, kind] == 0:
            continue
        if kind == takes_memory and not forward_fits(work, costs, state, queues, worker, stage, kind):
            continue
        first = queues[kind * (queues.size // 3) + state[worker, FIRST]] // queues.size
        if first < least:
            best, least = kind, first
    if best == _NONE:
        return _NONE
    wait = state[worker, _NEXT_US] - now
    is_due = 0 < wait <= patience_us and state[worker, _NEXT_PRIORITY] < least
    if is_due and wait < cost(work, best, stage, first_chain(work, state, queues, worker, best)):
        return _NONE
    op = int(take(state, queues, worker, best) % queues.size)
    if best == takes_memory:
        state[worker, HELD] += cost(work, TAKEN, stage, op % (queues.size // (3 * work.shape[1])))
    return op


@uncounted
def _finish(work: Ints, state: Ints, worker: int, stage: int, chain: int, kind: int, backwards: bool) -> None:
    if not backwards:
        finish(work, state, worker, stage, chain, kind)
        return
    # The memory that I frees was taken with W already, so that no I ever waits for memory.
    state[worker, BUSY] = 0
    state[worker, HELD] -= cost(work, TAKEN, stage, chain) if kind == F else 0


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
def _offer_first(pipeline: Ints, state: Ints, queues: Ints, priority: Ints, missing: Ints, num_pipelines: int) -> None:
    """Put the ops that wait for no other into the queues of their workers."""
    num_stages, num_chains = pipeline.shape
    for op in range(missing.size):
        if missing[op] == 0:
            stage = op // num_chains % num_stages
            _offer(state, queues, priority, stage * num_pipelines + pipeline[stage, op % num_chains], op)


@uncounted
def _settle(
    work: Ints,
    state: Ints,
    queues: Ints,
    priority: Ints,
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
        _finish(work, state, worker, stage, code % num_chains, kind, backwards)
        ready = _follower_here(code, kind, stage == num_stages - 1, num_each, backwards)
        there = follower_there(code, kind, stage, num_stages, num_chains, backwards)
    if ready >= 0:
        missing[ready] -= 1
        if missing[ready] == 0:
            _offer(state, queues, priority, worker, ready)
    return there


@uncounted
def _announce(state: Ints, priority: Ints, worker: int, op: int, arrival: int, now: int) -> None:
    """Let a worker know when an op that needs nothing else will arrive, if it knows of no more urgent one."""
    if state[worker, _NEXT_US] <= now or priority[op] < state[worker, _NEXT_PRIORITY]:
        state[worker, _NEXT_US] = arrival
        state[worker, _NEXT_PRIORITY] = priority[op]


@compiled
def priority_schedule(
    pipeline: Ints, work: Ints, costs: Ints, priority: Ints, opens_us: Ints, patience_us: Ints, num_pipelines: int, is_back: bool
) -> tuple[Ints, Ints]:
    """Return the start of each op, and the ops that could be placed by start: the lowest `priority` of a worker goes first.

    No op of a stage starts before `opens_us`. A worker waits up to `patience_us` of its stage for an op with a lower value that
    is known to arrive. In a backward pass, priorities that contradict each other can block memory: then some ops are not placed.
    """
    num_stages, num_chains = pipeline.shape
    num_workers, num_each = num_stages * num_pipelines, num_stages * num_chains
    out, order = np.empty(3 * num_each, np.int64), np.empty(3 * num_each, np.int64)
    missing = _missing(num_stages, num_chains, is_back)
    state, queues = empty_state(pipeline, num_pipelines, _NUM_STATE), np.empty(3 * num_each, np.int64)
    _offer_first(pipeline, state, queues, priority, missing, num_pipelines)
    # An event is time * base + code: the op that ends, or 3 * S * N more than the F or I that arrives.
    base = np.int64(5) * num_each
    events = np.empty(2 * num_each + num_workers, np.int64)
    touched, is_touched = np.empty(num_workers, np.int64), np.zeros(num_workers, np.bool_)
    by_release = np.argsort(opens_us)
    num_events, num_released, num_placed = 0, 0, 0
    while num_events > 0 or num_released < num_stages:
        num_touched = 0
        now = events[0] // base if num_events > 0 else opens_us[by_release[num_released]]
        if num_released < num_stages:
            now = min(now, opens_us[by_release[num_released]])
        while num_released < num_stages and opens_us[by_release[num_released]] == now:
            for worker in range(by_release[num_released] * num_pipelines, (by_release[num_released] + 1) * num_pipelines):
                num_touched = touch(touched, is_touched, num_touched, worker)
            num_released += 1
        while num_events > 0 and events[0] // base == now:
            code = heap_pop(events, 0, num_events) % base
            num_events -= 1
            stage = code // num_chains % num_stages
            worker = stage * num_pipelines + pipeline[stage, code % num_chains]
            there = _settle(work, state, queues, priority, missing, pipeline.shape, worker, code, is_back)
            if there >= 0:
                arrival = now + costs[min(stage, there // num_chains % num_stages), COMM_US]
                heap_push(events, 0, num_events, arrival * base + 3 * num_each + there)
                num_events += 1
            num_touched = touch(touched, is_touched, num_touched, worker)
        for index in range(num_touched):
            worker = touched[index]
            is_touched[worker] = False
            stage = worker // num_pipelines
            if state[worker, BUSY] or now < opens_us[stage]:
                continue
            op = _take(work, costs, state, queues, worker, stage, now, patience_us[stage], is_back)
            if op < 0:
                continue
            out[op], order[num_placed] = now, op
            num_placed += 1
            end = now + cost(work, op // num_each, stage, op % num_chains)
            heap_push(events, 0, num_events, end * base + op)
            num_events += 1
            there = follower_there(op, op // num_each, stage, num_stages, num_chains, is_back)
            if there >= 0 and missing[there] == 1:
                goes_to = there // num_chains % num_stages
                taker = goes_to * num_pipelines + pipeline[goes_to, there % num_chains]
                _announce(state, priority, taker, there, end + costs[min(stage, goes_to), COMM_US], now)
    return out, order[:num_placed]
