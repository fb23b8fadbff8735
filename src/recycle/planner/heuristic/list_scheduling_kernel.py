"""Compiled list scheduling by a priority rule, and justification of schedules, over integer arrays.

`list_schedule` goes forward in time. Whenever a worker is idle, the priority rule picks its next op: an input gradient first,
then a forward if memory allows, then a weight gradient; parameters by stage change that order. `justify` keeps the row orders
of a schedule and shifts its ops in time, right and then left, which shortens the spans of the stages.

Everything is integer and deterministic: events are ordered by (time, kind, stage, chain).
"""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from recycle.planner.model.assignment import Bools, Ints

Percents = npt.NDArray[np.uint8]

# Kinds as the kernel counts them; a start is out[kind, stage, chain].
F, I, W = 0, 1, 2  # noqa: E741
_NONE = -1

# First index of `work`, which is by stage and chain: lengths, where F, I and W are the numbers of the first three, and memory.
# For the list scheduler a chain with a WEIGHT_US of 0 runs its backward pass fused, in INPUT_US.
FORWARD_US, INPUT_US, WEIGHT_US, FUSED_US, TAKEN, KEPT, NUM_WORK = range(7)

# Columns of `costs`, a row a stage. COMM_US is the time to the next stage, LEAST and MOST the memory that any chain takes there.
COMM_US, CAPACITY, LEAST, MOST, NUM_COSTS = range(5)

# Columns of `parameters` of the priority rule, a row a stage. A worker prefers F to I while fewer than PUSH of its micro-batches
# are between F and I; it prefers W to F once more than STASH weight gradients wait, but not for its last HOLD micro-batches: it
# runs their W's while the last I's travel up. WINDOW limits its micro-batches between F and I. If an F or I is known to arrive
# within a share of PATIENCE_US, its urgency, the worker stays idle rather than start an op that would delay it.
PUSH, STASH, HOLD, WINDOW, PATIENCE_US, NUM_PARAMETERS = range(6)

# Columns of the state, a row a worker (stage * D + pipeline). Both kernels have: how many F's, I's and W's wait (where F, I, W
# point), memory held, whether it is busy, where its queues begin, how many micro-batches it runs. The list scheduler also has:
# F's started, I's ended, when the next urgent F and I are known to arrive, and how long it waits for each of the two.
HELD, BUSY, FIRST, SIZE, NUM_SHARED = range(3, 8)
_STARTED, _SEEN, _NEXT_FORWARD, _NEXT_INPUT, _FORWARD_PATIENCE, _INPUT_PATIENCE, _NUM_STATE = range(NUM_SHARED, NUM_SHARED + 7)
WHOLE_PATIENCE = 100  # the urgency of an op for which a worker waits as long as its patience says


def compiled(function: Any) -> Any:
    return numba.njit(cache=True, error_model="numpy")(function)


def uncounted(function: Any) -> Any:
    """Compile a function that allocates nothing; without reference counts on the arrays passed in it is much faster."""
    return numba.njit(cache=True, error_model="numpy", _nrt=False)(function)  # type: ignore[call-overload]


@uncounted
def cost(work: Ints, what: int, stage: int, chain: int) -> int:
    """The length or the memory of a chain's op at a stage; where all chains are alike, `work` has one for all of them."""
    return int(work[what, stage, min(chain, work.shape[2] - 1)])


@uncounted
def heap_push(heap: Ints, first: int, size: int, key: int) -> None:
    """Add `key` to the heap of `size` keys that begins at `first`."""
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if heap[first + above] <= key:
            break
        heap[first + at] = heap[first + above]
        at = above
    heap[first + at] = key


@uncounted
def heap_pop(heap: Ints, first: int, size: int) -> int:
    """Take the least key off the heap of `size` keys that begins at `first`."""
    top, last, at = heap[first], heap[first + size - 1], 0
    size -= 1
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        if below + 1 < size and heap[first + below + 1] < heap[first + below]:
            below += 1
        if heap[first + below] >= last:
            break
        heap[first + at] = heap[first + below]
        at = below
    heap[first + at] = last
    return int(top)


@uncounted
def _choose(work: Ints, costs: Ints, parameters: Ints, state: Ints, queues: Ints, worker: int, stage: int, now: int) -> int:
    """Return the kind that an idle worker starts now."""
    waiting, pending = state[worker, F] > 0, state[worker, W]
    active = state[worker, _STARTED] - state[worker, _SEEN]
    fits = active < parameters[stage, WINDOW] and forward_fits(work, costs, state, queues, worker, stage, F)
    pushes = active < parameters[stage, PUSH] and waiting
    kind = _NONE
    if pushes and fits:
        kind = F
    elif pushes and pending > 0:
        kind = W
    elif state[worker, I] > 0:
        return I
    elif pending > parameters[stage, STASH] and state[worker, SIZE] - state[worker, _STARTED] > parameters[stage, HOLD]:
        kind = W
    elif waiting and fits:
        kind = F
    elif pending > 0:
        kind = W
    if kind == _NONE or _better_waits(work, state, queues, worker, stage, kind, fits, now):
        return _NONE
    return kind


@uncounted
def _better_waits(work: Ints, state: Ints, queues: Ints, worker: int, stage: int, kind: int, fits: bool, now: int) -> bool:
    """Say whether an urgent op arrives so soon that `kind` would delay it."""
    to_input, to_forward = state[worker, _NEXT_INPUT] - now, state[worker, _NEXT_FORWARD] - now
    waits_for_input = 0 < to_input <= state[worker, _INPUT_PATIENCE]
    waits_for_forward = kind == W and fits and 0 < to_forward <= state[worker, _FORWARD_PATIENCE]
    if not waits_for_input and not waits_for_forward:
        return False
    length = cost(work, kind, stage, first_chain(work, state, queues, worker, kind))
    return bool((waits_for_input and to_input < length) or (waits_for_forward and to_forward < length))


@compiled
def empty_state(pipeline: Ints, num_pipelines: int, num_columns: int) -> Ints:
    num_stages, num_chains = pipeline.shape
    state = np.zeros((num_stages * num_pipelines, num_columns), np.int64)
    for stage in range(num_stages):
        for chain in range(num_chains):
            state[stage * num_pipelines + pipeline[stage, chain], SIZE] += 1
    for worker in range(1, num_stages * num_pipelines):
        state[worker, FIRST] = state[worker - 1, FIRST] + state[worker - 1, SIZE]
    return state


@uncounted
def offer(state: Ints, queues: Ints, worker: int, kind: int, key: int) -> None:
    """Put an op, whose inputs have arrived, into its worker's queue of `kind`; the least key is taken first."""
    heap_push(queues, queues.size // 3 * kind + state[worker, FIRST], state[worker, kind], key)
    state[worker, kind] += 1


@uncounted
def first_chain(work: Ints, state: Ints, queues: Ints, worker: int, kind: int) -> int:
    """The chain of the least key in the worker's queue of `kind`, which is not empty."""
    num_chains = queues.size // (3 * work.shape[1])
    return int(queues[queues.size // 3 * kind + state[worker, FIRST]] % num_chains)


@uncounted
def forward_fits(work: Ints, costs: Ints, state: Ints, queues: Ints, worker: int, stage: int, kind: int) -> bool:
    """Whether the first op of the worker's queue of `kind`, which takes memory, fits; in an empty queue, whether any would."""
    room = costs[stage, CAPACITY] - state[worker, HELD]
    # Most questions are answered without looking for the chain, which is slow.
    if room >= costs[stage, MOST] or room < costs[stage, LEAST] or state[worker, kind] == 0:
        return bool(room >= costs[stage, LEAST])
    return bool(cost(work, TAKEN, stage, first_chain(work, state, queues, worker, kind)) <= room)


@uncounted
def take(state: Ints, queues: Ints, worker: int, kind: int) -> int:
    """Take the least key off the worker's queue of `kind`, and let the worker be busy."""
    key = heap_pop(queues, queues.size // 3 * kind + state[worker, FIRST], state[worker, kind])
    state[worker, kind] -= 1
    state[worker, BUSY] = 1
    return int(key)


@uncounted
def finish(work: Ints, state: Ints, worker: int, stage: int, chain: int, kind: int) -> None:
    """Free the worker, and the memory that its op held: all of it after a fused backward, which has no W."""
    state[worker, BUSY] = 0
    if kind == I:
        kept = cost(work, KEPT, stage, chain) if cost(work, WEIGHT_US, stage, chain) > 0 else 0
        state[worker, HELD] -= cost(work, TAKEN, stage, chain) - kept
    elif kind == W:
        state[worker, HELD] -= cost(work, KEPT, stage, chain)


@uncounted
def touch(touched: Ints, is_touched: Bools, num_touched: int, worker: int) -> int:
    """Add a worker to those that may start an op now; return how many there are."""
    if is_touched[worker]:
        return num_touched
    is_touched[worker] = True
    touched[num_touched] = worker
    return num_touched + 1


@uncounted
def follower_there(op: int, kind: int, stage: int, num_stages: int, num_chains: int, backwards: bool) -> int:
    """The op of the same chain at a neighbouring stage that waits for this one, or -1."""
    goes_down, goes_up = (I, F) if backwards else (F, I)
    if kind == goes_down and stage < num_stages - 1:
        return op + num_chains
    if kind == goes_up and stage > 0:
        return op - num_chains
    return _NONE


@uncounted
def _begin(work: Ints, state: Ints, queues: Ints, num_chains: int, worker: int, stage: int, kind: int) -> int:
    """Begin the next op of `kind` on a worker; return its chain. W's keep the order in which they were offered."""
    chain = int(take(state, queues, worker, kind) % num_chains)
    if kind == F:
        state[worker, HELD] += cost(work, TAKEN, stage, chain)
        state[worker, _STARTED] += 1
    return chain


@uncounted
def _settle(rank: Ints, work: Ints, state: Ints, queues: Ints, worker: int, stage: int, code: int, num_stages: int) -> int:
    """Account for the end of an op or an arrival; return the op at a neighbouring stage that it leads to, or -1."""
    num_chains = rank.size
    chain, what = code % num_chains, code // num_chains // num_stages
    key = rank[chain] * num_chains + chain
    if what > W:
        offer(state, queues, worker, what - 3, key)
        return _NONE
    finish(work, state, worker, stage, chain, what)
    if what == I:
        if cost(work, WEIGHT_US, stage, chain) > 0:
            offer(state, queues, worker, W, state[worker, _SEEN] * num_chains + chain)
        state[worker, _SEEN] += 1
    elif what == F and stage == num_stages - 1:
        offer(state, queues, worker, I, key)
    return int(follower_there(code, what, stage, num_stages, num_chains, False))


@uncounted
def _announce(
    pipeline: Ints,
    costs: Ints,
    state: Ints,
    num_pipelines: int,
    stage: int,
    chain: int,
    kind: int,
    end: int,
    now: int,
    patience_us: int,
) -> None:
    """Let the worker that needs the result of an op, which ends at `end`, know when it arrives, and how long to wait for it."""
    goes_to = stage + 1 if kind == F else stage - 1
    worker = goes_to * num_pipelines + pipeline[goes_to, chain]
    arrival = end + costs[min(stage, goes_to), COMM_US]
    arrives, waits = (_NEXT_FORWARD, _FORWARD_PATIENCE) if kind == F else (_NEXT_INPUT, _INPUT_PATIENCE)
    if state[worker, arrives] <= now or arrival < state[worker, arrives]:
        state[worker, arrives], state[worker, waits] = arrival, patience_us


@compiled
def list_schedule(
    pipeline: Ints, rank: Ints, work: Ints, costs: Ints, rule: Ints, urgency: Percents, num_pipelines: int, out: Ints, order: Ints
) -> int:
    """Fill `out` with the starts of a schedule that respects order, workers and memory, and `order` with its ops by start.

    `pipeline[stage, chain]` is the pipeline that runs a chain, `rank[chain]` the order of chains where several wait, `rule` the
    parameters by stage. `urgency[kind, stage, chain]` is the share of its patience that a worker waits for an F or I, in percent.
    Returns the number of ops.
    """
    num_stages, num_chains = pipeline.shape
    state = empty_state(pipeline, num_pipelines, _NUM_STATE)
    queues = np.empty(3 * num_stages * num_chains, np.int64)
    # An event is time * base + code, code = (what * S + stage) * N + chain; what: an op's end (0 to 2), an arrival (3 F, 4 I).
    base = np.int64(5) * num_stages * num_chains
    events = np.empty(2 * num_stages * num_chains + num_stages * num_pipelines, np.int64)
    num_events, num_ops = 0, 0
    for chain in range(num_chains):
        offer(state, queues, pipeline[0, chain], F, rank[chain] * num_chains + chain)
    touched = np.arange(num_stages * num_pipelines)
    is_touched = np.zeros(num_stages * num_pipelines, np.bool_)
    num_touched = num_pipelines
    now = np.int64(0)
    while True:
        for index in range(num_touched):
            worker = touched[index]
            is_touched[worker] = False
            if state[worker, BUSY]:
                continue
            stage = worker // num_pipelines
            kind = _choose(work, costs, rule, state, queues, worker, stage, now)
            if kind == _NONE:
                continue
            chain = _begin(work, state, queues, num_chains, worker, stage, kind)
            out[kind, stage, chain] = now
            code = (kind * num_stages + stage) * num_chains + chain
            order[num_ops] = code
            num_ops += 1
            end = now + cost(work, kind, stage, chain)
            heap_push(events, 0, num_events, end * base + code)
            num_events += 1
            goes_to = stage + 1 if kind == F else stage - 1
            if kind != W and 0 <= goes_to < num_stages and urgency[kind, goes_to, chain] > 0:
                patience_us = rule[goes_to, PATIENCE_US] * urgency[kind, goes_to, chain] // WHOLE_PATIENCE
                _announce(pipeline, costs, state, num_pipelines, stage, chain, kind, end, now, patience_us)
        if num_events == 0:
            return num_ops
        num_touched = 0
        now = events[0] // base
        while num_events > 0 and events[0] // base == now:
            code = heap_pop(events, 0, num_events) % base
            num_events -= 1
            stage = code // num_chains % num_stages
            worker = stage * num_pipelines + pipeline[stage, code % num_chains]
            there = _settle(rank, work, state, queues, worker, stage, code, num_stages)
            if there >= 0:
                arrival = now + costs[min(stage, there // num_chains % num_stages), COMM_US]
                heap_push(events, 0, num_events, arrival * base + 3 * num_stages * num_chains + there)
                num_events += 1
            num_touched = touch(touched, is_touched, num_touched, worker)


@compiled
def last_ends(work: Ints, is_fused: Bools, out: Ints) -> Ints:
    """When the last W or B of each stage ends."""
    num_stages, num_chains = is_fused.shape
    last = np.zeros(num_stages, np.int64)
    for stage in range(num_stages):
        for chain in range(num_chains):
            what, start = (FUSED_US, out[I, stage, chain]) if is_fused[stage, chain] else (WEIGHT_US, out[W, stage, chain])
            last[stage] = max(last[stage], start + cost(work, what, stage, chain))
    return last


@compiled
def right_shift(
    pipeline: Ints, work: Ints, costs: Ints, is_fused: Bools, num_pipelines: int, order: Ints, last: Ints, out: Ints
) -> None:
    """Start every op as late as the `last` end of its stage and the ops that wait for it allow, keeping the order of rows."""
    num_stages, num_chains = pipeline.shape
    free = np.empty(num_stages * num_pipelines, np.int64)
    for worker in range(free.size):
        free[worker] = last[worker // num_pipelines]
    for index in range(order.size - 1, -1, -1):
        code = order[index]
        chain, stage, kind = code % num_chains, code // num_chains % num_stages, code // num_chains // num_stages
        worker = stage * num_pipelines + pipeline[stage, chain]
        fused = is_fused[stage, chain]
        end = free[worker]
        if kind == F or (kind == I and not fused):
            end = min(end, out[kind + 1, stage, chain])
        if kind == F and stage < num_stages - 1:
            end = min(end, out[F, stage + 1, chain] - costs[stage, COMM_US])
        elif kind == I and stage > 0:
            end = min(end, out[I, stage - 1, chain] - costs[stage - 1, COMM_US])
        start = end - cost(work, FUSED_US if kind == I and fused else kind, stage, chain)
        out[kind, stage, chain] = start
        free[worker] = start


@compiled
def _left_shift(pipeline: Ints, work: Ints, costs: Ints, is_fused: Bools, num_pipelines: int, order: Ints, out: Ints) -> None:
    """Start every op as early as its row and its needs allow, but no stage earlier than it starts now."""
    num_stages, num_chains = pipeline.shape
    free = np.empty(num_stages * num_pipelines, np.int64)
    for stage in range(num_stages):
        free[stage * num_pipelines : (stage + 1) * num_pipelines] = out[F, stage].min()
    for code in order:
        chain, stage, kind = code % num_chains, code // num_chains % num_stages, code // num_chains // num_stages
        worker = stage * num_pipelines + pipeline[stage, chain]
        start = free[worker]
        if kind == F and stage > 0:
            start = max(start, out[F, stage - 1, chain] + cost(work, FORWARD_US, stage - 1, chain) + costs[stage - 1, COMM_US])
        elif kind == I:
            start = max(start, out[F, stage, chain] + cost(work, FORWARD_US, stage, chain))
            if stage < num_stages - 1:
                length = cost(work, FUSED_US if is_fused[stage + 1, chain] else INPUT_US, stage + 1, chain)
                start = max(start, out[I, stage + 1, chain] + length + costs[stage, COMM_US])
        elif kind == W:
            start = max(start, out[I, stage, chain] + cost(work, INPUT_US, stage, chain))
        out[kind, stage, chain] = start
        free[worker] = start + cost(work, FUSED_US if kind == I and is_fused[stage, chain] else kind, stage, chain)


@compiled
def justify(pipeline: Ints, work: Ints, costs: Ints, is_fused: Bools, num_pipelines: int, order: Ints, out: Ints) -> None:
    """Shift the ops of each stage right as far as its last end allows, then left as far as its first start allows.

    No span grows, most shrink. `order` lists the ops as (kind * S + stage) * N + chain, each after the ops that it needs; a fused
    backward is its I. Memory depends on the order in a row alone, which does not change.
    """
    _left_shift(pipeline, work, costs, is_fused, num_pipelines, order, out)
    right_shift(pipeline, work, costs, is_fused, num_pipelines, order, last_ends(work, is_fused, out), out)
    _left_shift(pipeline, work, costs, is_fused, num_pipelines, order, out)
