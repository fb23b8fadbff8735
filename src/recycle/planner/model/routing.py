"""Routing: which live peer executes the micro-batches of a dead worker.

Micro-batches of live workers stay at home. Those of a dead one go to its peers in turn, always to one of the least loaded,
so that every prefix of the iteration is balanced; among those a micro-batch keeps to the pipeline that took it at
the last failed stage, so that the traffic of a dead worker runs in lanes instead of crossing at every stage.
"""

import numpy as np

from recycle.core.problem import Problem
from recycle.planner.model.schedule import Ints


def ranks(problem: Problem) -> Ints:
    """The order in which chains go first where several wait: by micro-batch index, then by home pipeline."""
    shape = problem.shape
    chains = np.arange(shape.num_chains, dtype=np.int64)
    return chains % shape.num_microbatches * shape.num_pipelines + chains // shape.num_microbatches


def balanced_routes(problem: Problem) -> Ints:
    """Return [stage, chain] the pipeline that executes it; loads of peers differ by one at most."""
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
    """Give `chains`, in order, to `live` pipelines in rounds: each takes one a round, its own lane's chain if it can."""
    free = list(live)
    turn = 0
    for chain in chains.tolist():
        if not free:
            free = live[turn % len(live) :] + live[: turn % len(live)]
        taker = int(lane[chain]) if int(lane[chain]) in free else free[0]
        free.remove(taker)
        if not free:
            turn += 1
        routes[chain] = lane[chain] = taker
