"""A reference optimum that shares no code with the planner: it tries every route, every split and every order.

It states the rules again, and takes seconds for four chains at one stage or two at three.
"""

from collections.abc import Iterator
from itertools import islice, pairwise, product

from recycle.core.problem import Problem

Item = tuple[str, int, int]  # kind, stage, chain
Edge = tuple[Item, Item, int]  # from start to start
Choice = tuple[int, bool]  # the pipeline that runs a chain at a stage, and whether its backward pass is fused


def best_period_us(problem: Problem, limit: int, any_route: bool = False) -> int | None:
    """The least period of all schedules; None if there are more than `limit` of them up to idle time.

    A chain stays on its home worker if that is alive, unless `any_route`.
    """
    best = _serial_us(problem)
    tried = 0
    for choice in _choices(problem, any_route):
        rows = [list(islice(_orders(problem, choice, stage, where), limit + 1)) for stage, where in _workers(problem)]
        for orders in product(*rows):
            tried += 1
            if tried > limit:
                return None
            in_a_row = [(a, b, _length(problem, a)) for order in orders for a, b in pairwise(order)]
            edges = _edges(problem, choice) + in_a_row
            while _fits(problem, edges, orders, best - 1):
                best -= 1
    return best


def _workers(problem: Problem) -> list[tuple[int, int]]:
    return [(stage, where) for stage in range(problem.shape.num_stages) for where in problem.cluster.live_pipelines(stage)]


def _choices(problem: Problem, any_route: bool) -> Iterator[dict[tuple[int, int], Choice]]:
    """Every assignment of chains to workers and every way to fuse."""
    shape = problem.shape
    keys = [(stage, chain) for stage in range(shape.num_stages) for chain in range(shape.num_chains)]
    ways = []
    for stage, chain in keys:
        home, live = chain // shape.num_microbatches, problem.cluster.live_pipelines(stage)
        peers = [home] if home in live and not any_route else live
        ways.append([(peer, fused) for peer in peers for fused in ((True, False) if problem.techniques.decoupled else (True,))])
    return (dict(zip(keys, way, strict=True)) for way in product(*ways))


def _orders(problem: Problem, choice: dict[tuple[int, int], Choice], stage: int, where: int) -> Iterator[tuple[Item, ...]]:
    """Every order of a worker's ops in which F, I, W or F, B of each chain follow each other and memory is enough."""
    chains = [chain for (at, chain), (peer, _) in choice.items() if at == stage and peer == where]
    todo = {chain: "FB" if choice[stage, chain][1] else "FIW" for chain in chains}
    capacity = problem.capacity(stage)
    whole, rest = problem.held_by_forward(stage), problem.held_for_weight(stage)
    change = {"F": whole, "I": rest - whole, "W": -rest, "B": -whole}

    def extend(order: tuple[Item, ...], held: int) -> Iterator[tuple[Item, ...]]:
        if not any(todo.values()):
            yield order
        for chain in chains:
            left = todo[chain]
            if left and (capacity is None or held + change[left[0]] <= capacity):
                todo[chain] = left[1:]
                yield from extend((*order, (left[0], stage, chain)), held + change[left[0]])
                todo[chain] = left

    return extend((), 0)


def _length(problem: Problem, item: Item) -> int:
    costs = problem.profile.stages[item[1]]
    return {"F": costs.forward_us, "I": costs.input_us, "W": costs.weight_us, "B": costs.fused_us}[item[0]]


def _edges(problem: Problem, choice: dict[tuple[int, int], Choice]) -> list[Edge]:
    """A chain goes up the stages forward and down backward, and crosses a link between two of them."""
    edges = []
    for chain in range(problem.shape.num_chains):
        path = [("F", stage, chain) for stage in range(problem.shape.num_stages)]
        path += [("B" if choice[stage, chain][1] else "I", stage, chain) for _, stage, _ in reversed(path)]
        for a, b in pairwise(path):
            link = problem.profile.comm_us(min(a[1], b[1])) if a[1] != b[1] else 0
            edges.append((a, b, _length(problem, a) + link))
    return edges


def _fits(problem: Problem, edges: list[Edge], orders: tuple[tuple[Item, ...], ...], period_us: int) -> bool:
    """Is there a schedule of that order with that period? Push starts up until they settle, or exceed every chance."""
    used = [order for order in orders if order]
    step = max(costs.optimizer_us for costs in problem.profile.stages)
    if problem.techniques.staggered:
        edges = list(edges)
        for one, other in product(used, used):
            stage = one[0][1]
            if other[0][1] == stage:
                edges.append((one[-1], other[0], _length(problem, one[-1]) + problem.finish_us(stage) - period_us))
    starts = {item: 0 for order in orders for item in order}
    for _ in range(len(starts) + 1):
        late = [(b, starts[a] + wait) for a, b, wait in edges if starts[a] + wait > starts[b]]
        if not late:
            ends = [starts[row[-1]] + _length(problem, row[-1]) + problem.reduce_us(row[-1][1]) for row in used]
            return problem.techniques.staggered or max(ends) + step <= period_us
        for item, start in late:
            starts[item] = max(starts[item], start)
    return False


def _serial_us(problem: Problem) -> int:
    """Surely enough: all work and all links one after the other, and every step."""
    stages = range(problem.shape.num_stages)
    work = sum(_length(problem, (kind, stage, 0)) for stage in stages for kind in "FIWB")
    links = sum(2 * problem.profile.comm_us(stage) for stage in stages[:-1])
    return problem.shape.num_chains * (work + links) + sum(map(problem.finish_us, stages))
