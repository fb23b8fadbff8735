"""Layers that several stages hold: which ops end the use of a layer in an iteration, and which ops wait for its step.

Staggered, such a layer is stepped when all its holders have added their gradients. Its next use waits for that step, at whichever
stage it is; other ops of these stages do not wait.
"""

from dataclasses import dataclass

from recycle.core.op import Kind
from recycle.sim.replay.op_graph import OpGraph


@dataclass(frozen=True, slots=True)
class LayerStep:
    """A layer that several stages use: the op of each row that uses it first and the one that uses it last, and its finish."""

    first_ops: tuple[int, ...]
    last_ops: tuple[int, ...]
    finish_us: int


def layer_steps(graph: OpGraph) -> list[LayerStep]:
    """Return the layers that ops of several stages use; none if stages step together, because then every op waits for all."""
    plan, held = graph.plan, graph.problem.held_layers
    if held is None or not plan.cuts or not graph.problem.techniques.staggered:
        return []
    costs, firsts, lasts = plan.costs, dict[tuple[int, int], int](), dict[tuple[int, int], int]()
    for number, row in enumerate(plan.rows):
        stage, begin = row.worker.stage, int(graph.bounds[number])
        shared = [layer for layer in held.ranges[stage] if len(held.holders[layer]) > 1]
        for index, (kind, chain) in enumerate(zip(row.kinds, row.chains, strict=True), start=begin):
            if kind == Kind.I.value:
                continue
            used = costs.layers(stage, chain)
            for layer in shared:
                if layer in used:
                    firsts.setdefault((layer, number), index)
                    lasts[layer, number] = index
    steps = []
    for layer in held.shared:
        rows = [number for other, number in firsts if other == layer]
        if len({plan.rows[number].worker.stage for number in rows}) > 1:
            first, last = (tuple(column[layer, number] for number in rows) for column in (firsts, lasts))
            steps.append(LayerStep(first, last, held.finish_of_layer_us[layer]))
    return steps
