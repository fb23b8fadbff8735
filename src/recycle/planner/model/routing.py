"""Routing: which live peer executes the micro-batches of a dead worker, and those that a slow worker has no time for."""

import heapq

import numpy as np
import numpy.typing as npt

from recycle.core.problem import Problem
from recycle.planner.model.assignment import Ints, is_even, speeds_of


def ranks(problem: Problem) -> Ints:
    """The order of chains where several wait: by micro-batch index, then by home pipeline."""
    shape = problem.shape
    chains = np.arange(shape.num_chains, dtype=np.int64)
    return chains % shape.num_microbatches * shape.num_pipelines + chains // shape.num_microbatches


def balanced_routes(problem: Problem) -> Ints:
    """Return by [stage, chain] the pipeline that executes it; the loads of peers differ by one at most."""
    shape, cluster = problem.shape, problem.cluster
    home = np.arange(shape.num_chains, dtype=np.int64) // shape.num_microbatches
    routes = np.tile(home, (shape.num_stages, 1))
    lane = np.full(shape.num_chains, -1, dtype=np.int64)
    in_order = np.argsort(ranks(problem))
    for stage in (stage for stage, num in enumerate(cluster.num_failed) if num):
        live = cluster.live_pipelines(stage)
        is_live = np.isin(home, live)
        _share_out(in_order[~is_live[in_order]], live, lane, routes[stage])
    return routes


def _share_out(chains: Ints, live: list[int], lane: Ints, routes: Ints) -> None:
    """Give `chains`, in order, to `live` pipelines in rounds: each takes one a round, one of its own lane if there is one."""
    free = list(live)
    num_rounds = 0
    for chain in chains.tolist():
        if not free:
            free = live[num_rounds % len(live) :] + live[: num_rounds % len(live)]
        taker = int(lane[chain]) if int(lane[chain]) in free else free[0]
        free.remove(taker)
        if not free:
            num_rounds += 1
        routes[chain] = lane[chain] = taker


def routes_by_speed(problem: Problem) -> Ints:
    """Return by [stage, chain] the pipeline that executes it; at stages with slow workers, each takes a share by its speed."""
    routes = balanced_routes(problem)
    if not problem.techniques.adaptive:
        return routes
    for stage in range(problem.shape.num_stages):
        if not is_even(problem, stage):
            routes[stage] = _shares_by_speed(problem, speeds_of(problem)[stage])
    return routes


def _shares_by_speed(problem: Problem, speeds: npt.NDArray[np.float64]) -> Ints:
    """Let a worker keep as many of its micro-batches as its share, and give the others to peers with room, evenly over time."""
    shape = problem.shape
    counts = _counts_by_speed(shape.num_chains, speeds)
    home = np.arange(shape.num_chains, dtype=np.int64) // shape.num_microbatches
    routes, is_given = home.copy(), np.zeros(shape.num_chains, dtype=np.bool_)
    for pipeline, count in enumerate(counts):
        num_given = max(0, shape.num_microbatches - count)
        at = (2 * np.arange(num_given) + 1) * shape.num_microbatches // max(1, 2 * num_given)
        is_given[pipeline * shape.num_microbatches + at] = True
    room = np.maximum(0, np.array(counts) - shape.num_microbatches).astype(float)
    credit, total = np.zeros_like(room), room.sum()
    in_order = np.argsort(ranks(problem))
    for chain in in_order[is_given[in_order]].tolist():
        credit += room / total
        taker = int(np.argmax(credit))
        credit[taker] -= 1
        routes[chain] = taker
    return routes


def _counts_by_speed(num_chains: int, speeds: npt.NDArray[np.float64]) -> list[int]:
    """How many chains each worker of a stage runs, so that the slowest of them ends as early as possible."""
    counts = [0] * len(speeds)
    heap = [(1 / speed, pipeline) for pipeline, speed in enumerate(speeds.tolist()) if speed > 0]
    heapq.heapify(heap)
    for _ in range(num_chains):
        _, pipeline = heap[0]
        counts[pipeline] += 1
        heapq.heapreplace(heap, ((counts[pipeline] + 1) / float(speeds[pipeline]), pipeline))
    return counts
