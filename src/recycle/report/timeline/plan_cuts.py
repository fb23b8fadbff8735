"""Where a plan cuts its micro-batches, as text: how many layers each stage computes of each micro-batch."""

from collections.abc import Iterator

from recycle.core.plans.plan import Plan

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_MOST_PIPELINES = 8


def draw_cuts(plan: Plan, width: int, all_rows: bool = False) -> list[str]:
    """Return a table with a line for each stage and a letter for each micro-batch; nothing if none is cut elsewhere.

    A dot is a micro-batch that has the stage's own layers there; a digit is the number of layers that it has instead. Pipelines
    are one beside the other, in as many blocks of lines as `width` demands; of many, the first few, unless `all_rows`.
    """
    held, shape = plan.problem.held_layers, plan.problem.shape
    if held is None or not plan.cuts:
        return []
    pipelines = list(range(shape.num_pipelines if all_rows else min(_MOST_PIPELINES, shape.num_pipelines)))
    margin = len(f"stage {shape.num_stages - 1} (99)") + 2
    cell = max(shape.num_microbatches, len("pipeline 99")) + 2
    across = max(1, (width - margin) // cell)
    lines = ["layers of each micro-batch at each stage; a dot is the stage's own number, which stands in brackets"]
    for first in range(0, len(pipelines), across):
        chosen = pipelines[first : first + across]
        lines.append("")
        lines.append((" " * margin + "".join(f"pipeline {each}".ljust(cell) for each in chosen)).rstrip())
        for stage in range(shape.num_stages):
            name = f"stage {stage} ({len(plan.problem.profile.layers[stage])})"
            parts = ("".join(_letters(plan, stage, pipeline)).ljust(cell) for pipeline in chosen)
            lines.append((name.ljust(margin) + "".join(parts)).rstrip())
    if len(pipelines) < shape.num_pipelines:
        lines.append(f"{shape.num_pipelines - len(pipelines)} pipelines are not shown; --rows all shows them")
    return lines


def _letters(plan: Plan, stage: int, pipeline: int) -> Iterator[str]:
    num, costs = plan.problem.shape.num_microbatches, plan.costs
    for chain in range(pipeline * num, (pipeline + 1) * num):
        before, after = costs.offsets(stage, chain)
        yield "." if before == after else _DIGITS[min(len(costs.layers(stage, chain)), len(_DIGITS) - 1)]
