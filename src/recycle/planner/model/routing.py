"""Routing: which live peer executes the micro-batches of a dead worker."""

import numpy as np

from recycle.core.problem import Problem
from recycle.planner.model.schedule import Ints


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
