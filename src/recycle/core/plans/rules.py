"""The rules of a legal plan, each stated once: which ops an op needs, the period that slots give, and `check`.

No rule joins two micro-batches except on a worker, so `check` tests whole columns (all micro-batches of one kind at one stage)
at a time, and looks for the slot at fault only in a column that fails. So it checks a plan of a million ops in seconds without
any library.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add, gt

from recycle.core.cluster import Worker
from recycle.core.op import Kind, MicroBatch, Op
from recycle.core.plans.op_costs import Offsets, OpCosts
from recycle.core.plans.plan import Plan, Row, microbatch_of
from recycle.core.problem import Problem

_ABSENT = -1


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that a plan breaks, and the sentence that says where."""

    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


def needs(op: Op, num_stages: int) -> Iterator[Op]:
    """Yield the ops that must have ended before `op` may start; a fused B stands for its I and its W."""
    microbatch = op.microbatch
    match op.kind:
        case Kind.F:
            if op.stage > 0:
                yield Op(op.stage - 1, Kind.F, microbatch)
        case Kind.I | Kind.B:
            yield Op(op.stage, Kind.F, microbatch)
            if op.stage < num_stages - 1:
                yield Op(op.stage + 1, Kind.I, microbatch)
        case Kind.W:
            yield Op(op.stage, Kind.I, microbatch)


def lag_us(before: Op, after: Op, problem: Problem) -> int:
    """Time that must pass between the end of `before` and the start of `after`: the way between two stages."""
    return problem.profile.comm_us(min(before.stage, after.stage)) if before.stage != after.stage else 0


def stage_windows(plan: Plan) -> list[tuple[int, int]]:
    """Return for each stage when its first op starts and when its last one ends, over all its workers."""
    windows: dict[int, tuple[int, int]] = {}
    costs = plan.costs
    for row in plan.rows:
        if not row.kinds:
            continue
        stage = row.worker.stage
        last = row.starts_us[-1] + costs.duration_us(row.worker, Kind(row.kinds[-1]), row.chains[-1])
        first = row.starts_us[0]
        known = windows.get(stage, (first, last))
        windows[stage] = _joined(known, (first, last))
    return [windows.get(stage, (0, 0)) for stage in range(plan.problem.shape.num_stages)]


def layer_windows(plan: Plan) -> dict[int, tuple[int, int]]:
    """Return for each layer that several stages hold when its first F starts and when its last W or B ends.

    A micro-batch uses a layer at the stage that computes it for this micro-batch. Without cuts a layer is used at its own stage
    alone, so that the window of that stage says it all, and nothing is returned.
    """
    held, costs = plan.problem.held_layers, plan.costs
    if held is None or not plan.cuts:
        return {}
    windows: dict[int, tuple[int, int]] = {}
    for row in plan.rows:
        stage = row.worker.stage
        shared = [layer for layer in held.ranges[stage] if len(held.holders[layer]) > 1]
        for offsets, window in _windows_by_offsets(row, costs).items():
            used = costs.layers_at(stage, offsets)
            for layer in shared:
                if layer in used:
                    windows[layer] = _joined(windows.get(layer, window), window)
    return windows


def _windows_by_offsets(row: Row, costs: OpCosts) -> dict[Offsets, tuple[int, int]]:
    """When the first F starts and the last W or B ends of the micro-batches that a worker computes between the same two cuts."""
    found: dict[Offsets, tuple[int, int]] = {}
    ends = map(add, row.starts_us, costs.durations_us(row.worker, row.kinds, row.chains))
    all_offsets = map(costs.offsets_of_chains(row.worker.stage).__getitem__, row.chains)
    input_gradient = Kind.I.value
    for kind, offsets, start, end in zip(row.kinds, all_offsets, row.starts_us, ends, strict=True):
        if kind != input_gradient:
            first, last = found.get(offsets, (start, end))
            found[offsets] = first if first < start else start, last if last > end else end
    return found


def _joined(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return min(one[0], other[0]), max(one[1], other[1])


def period_from(
    problem: Problem, windows: Sequence[tuple[int, int]], of_layers: Mapping[int, tuple[int, int]] | None = None
) -> int:
    """Return the period that stage windows allow: staggered the longest span, else the whole iteration.

    A stage may start its next iteration when its own step is done (staggered), or when every stage has reduced
    its gradients and stepped (synchronous). A layer that several stages hold is stepped when all of them have added their
    gradients: staggered, its next use waits for that, whichever stage it is at.
    """
    if problem.techniques.staggered:
        spans = [last + problem.finish_us(stage) - first for stage, (first, last) in enumerate(windows)]
        if of_layers:
            assert problem.held_layers is not None
            finish = problem.held_layers.finish_of_layer_us
            spans += [last + finish[layer] - first for layer, (first, last) in of_layers.items()]
        return max(spans)
    reduced = max(last + problem.reduce_us(stage) for stage, (_, last) in enumerate(windows))
    stepped = reduced + max(map(problem.optimizer_us, range(len(windows))))
    return stepped - min(first for first, _ in windows)


def period_us(plan: Plan) -> int:
    return period_from(plan.problem, stage_windows(plan), layer_windows(plan))


def makespan_us(plan: Plan) -> int:
    """Return the time from the first op to the end of the last optimizer step of one iteration."""
    windows = stage_windows(plan)
    if not plan.problem.techniques.staggered:
        return period_from(plan.problem, windows)
    ends = (last + plan.problem.finish_us(stage) for stage, (_, last) in enumerate(windows))
    return max(ends) - min(first for first, _ in windows)


def peak_in_flight(plan: Plan) -> list[int]:
    """Return for each stage the most micro-batches that one of its workers holds at once, from F to W or B."""
    peaks = [0] * plan.problem.shape.num_stages
    step = {"F": 1, "I": 0, "W": -1, "B": -1}
    for row in plan.rows:
        peak = max(accumulate(map(step.__getitem__, row.kinds)), default=0)
        peaks[row.worker.stage] = max(peaks[row.worker.stage], peak)
    return peaks


def check(plan: Plan) -> list[Violation]:
    """Return every violation of a rule by `plan`.

    The rules: dependencies, one op at a time, memory, every op exactly once, only live workers, only peers of the stage, every
    layer of a micro-batch once and by a worker that holds it, the techniques, and a period and bound that agree with the slots.

    Args:
        plan: Any plan, from a file too.

    Returns:
        The violations, each with its rule and a sentence; an empty list if the plan is legal.

    Example:
        >>> import recycle
        >>> recycle.check(recycle.solve(recycle.problem(2, 2, 4, costs="1,1,1")))
        []
    """
    found = [*_check_form(plan), *_check_cuts(plan)]
    if found:
        return found  # the other checks need rows that name workers and ops of this cluster
    found += _check_workers(plan)
    costs = plan.costs
    found += [violation for row in plan.rows for violation in _check_row(plan, row, costs)]
    columns = _Columns(plan, costs)
    found += columns.duplicates
    found += _check_complete(plan, columns)
    found += _check_dependencies(plan, columns)
    if not found and (actual := period_us(plan)) != plan.period_us:
        found.append(Violation("period", f"the plan claims a period of {plan.period_us} µs, but its slots take {actual} µs"))
    found += _check_quality(plan, is_period_right=not found)
    return found


def _check_form(plan: Plan) -> Iterator[Violation]:
    """Rows belong to workers of the cluster, and hold ops of its micro-batches."""
    shape = plan.problem.shape
    for row in plan.rows:
        worker = row.worker
        if worker not in shape:
            yield Violation("workers", f"{worker} has a row, but the cluster has no such worker")
        if set(row.kinds) - set("FBIW") or (row.chains and not 0 <= min(row.chains) <= max(row.chains) < shape.num_chains):
            yield Violation("every op once", f"the row of {worker} holds ops of no micro-batch of this cluster")


def _check_cuts(plan: Plan) -> Iterator[Violation]:
    """Cuts lie within the layers that both stages hold, and leave every stage a layer of every micro-batch.

    The layers of a stage go from one cut to the next, so that every layer is computed once.
    """
    problem, cuts = plan.problem, plan.cuts
    if not cuts:
        return
    shape, held = problem.shape, problem.held_layers
    if held is None or len(cuts) != shape.num_stages - 1 or any(len(offsets) != shape.num_chains for offsets in cuts):
        yield Violation(
            "layers", "the plan cuts micro-batches, but not one cut for each boundary and micro-batch of shared layers"
        )
        return
    for boundary, offsets in enumerate(cuts, start=1):
        if max(map(abs, offsets)) > held.num_shared:
            chain = next(chain for chain, offset in enumerate(offsets) if abs(offset) > held.num_shared)
            where = f"micro-batch {_name(problem, chain)} is cut {offsets[chain]} layers from boundary {boundary}"
            yield Violation("layers", f"{where}, but the stages share only {held.num_shared} layers on either side")
    none = (0,) * shape.num_chains
    for stage, (before, after) in enumerate(pairwise([none, *cuts, none])):
        base = held.sums.bounds[stage + 1] - held.sums.bounds[stage]
        for chain, (first, last) in enumerate(zip(before, after, strict=True)):
            if base + last - first < 1:
                yield Violation("layers", f"stage {stage} computes no layer of micro-batch {_name(problem, chain)}")


def _name(problem: Problem, chain: int) -> str:
    microbatch = microbatch_of(problem.shape, chain)
    return f"{microbatch.index}@{microbatch.pipeline}"


def _check_quality(plan: Plan, is_period_right: bool) -> Iterator[Violation]:
    """Period, bound and status do not contradict each other; whether the bound is a true one, only a planner can prove."""
    bound, status = plan.quality.bound_us, plan.quality.status
    if bound > plan.period_us:
        yield Violation("bound", f"the bound {bound} µs lies above the period {plan.period_us} µs")
    elif (
        bound < 0 or status not in ("optimal", "feasible") or (is_period_right and status == "optimal" and bound < plan.period_us)
    ):
        yield Violation("bound", f"the status is {status!r} with a bound of {bound} µs and a period of {plan.period_us} µs")


def _check_workers(plan: Plan) -> Iterator[Violation]:
    """Every live worker has one row: ops are ordered only within a row."""
    rows = Counter(row.worker for row in plan.rows)
    for worker, num in rows.items():
        if num > 1:
            yield Violation("workers", f"{worker} has {num} rows, but a worker has one")
    for worker in plan.problem.cluster.live_workers():
        if worker not in rows:
            yield Violation("workers", f"{worker} is alive, but it has no row")


def _check_row(plan: Plan, row: Row, costs: OpCosts) -> Iterator[Violation]:
    problem, worker = plan.problem, row.worker
    if not problem.cluster.is_live(worker):
        yield Violation("workers", f"{worker} has a row, but it is dead")
    ends = list(map(add, row.starts_us, costs.durations_us(worker, row.kinds, row.chains)))
    if any(map(gt, ends, row.starts_us[1:])):
        for before, after in pairwise(plan.slots(row)):
            if before.end_us > after.start_us:
                yield Violation(
                    "one op at a time",
                    f"{worker} starts {after.op} at {after.start_us} µs, but {before.op} ends at {before.end_us} µs",
                )
    if row.starts_us and min(row.starts_us) < 0:
        yield Violation("time", f"{worker} starts an op before time 0")
    yield from _check_techniques(plan, row)
    yield from _check_memory(plan, row, costs)


def _check_techniques(plan: Plan, row: Row) -> Iterator[Violation]:
    techniques, num_microbatches = plan.problem.techniques, plan.problem.shape.num_microbatches
    if not techniques.decoupled and ("I" in row.kinds or "W" in row.kinds):
        yield Violation("techniques", f"{row.worker} splits a backward pass, but 'decoupled' is off")
    first = row.worker.pipeline * num_microbatches
    if not techniques.adaptive and row.chains and not (first <= min(row.chains) <= max(row.chains) < first + num_microbatches):
        for slot in plan.slots(row):
            if slot.is_rerouted:
                yield Violation("techniques", f"{row.worker} runs {slot.op} of another pipeline, but 'adaptive' is off")


def _check_memory(plan: Plan, row: Row, costs: OpCosts) -> Iterator[Violation]:
    """Ops on a worker do not overlap, so the memory held changes in row order and is largest when an F starts."""
    problem = plan.problem
    capacity = problem.capacity(row.worker.stage)
    if capacity is None:
        return
    held = list(accumulate(costs.memory_deltas(row.worker, row.kinds, row.chains)))
    if held and max(held) > capacity:
        at = next(index for index, value in enumerate(held) if value > capacity)
        slot = list(plan.slots(row))[at]
        unit = "layers of micro-batches" if problem.held_layers and problem.memory.unit != "bytes" else problem.memory.unit
        yield Violation(
            "memory", f"{row.worker} holds {held[at]} {unit} when {slot.op} starts at {slot.start_us} µs, but may hold {capacity}"
        )


class _Columns:
    """Starts and ends by stage, kind and chain, the pipeline that runs each chain at each stage, and ops that occur twice."""

    def __init__(self, plan: Plan, costs: OpCosts) -> None:
        shape = plan.problem.shape
        num_stages, num_chains = shape.num_stages, shape.num_chains
        self.starts = {(s, k.value): [_ABSENT] * num_chains for s in range(num_stages) for k in Kind}
        self.ends = {(s, k.value): [_ABSENT] * num_chains for s in range(num_stages) for k in Kind}
        self.pipeline = {(s, k.value): [_ABSENT] * num_chains for s in range(num_stages) for k in Kind}
        self.duplicates: list[Violation] = []
        for row in plan.rows:
            self._add(plan, row, costs.durations_us(row.worker, row.kinds, row.chains))

    def _add(self, plan: Plan, row: Row, durations: list[int]) -> None:
        stage, pipeline = row.worker.stage, row.worker.pipeline
        starts, ends, pipelines = (
            {k.value: columns[stage, k.value] for k in Kind} for columns in (self.starts, self.ends, self.pipeline)
        )
        for kind, chain, start, duration in zip(row.kinds, row.chains, row.starts_us, durations, strict=True):
            if starts[kind][chain] != _ABSENT:
                op = Op(stage, Kind(kind), microbatch_of(plan.problem.shape, chain))
                where = Worker(pipelines[kind][chain], stage)
                self.duplicates.append(Violation("every op once", f"{op} is on {row.worker} at {start} µs and on {where} too"))
            starts[kind][chain] = start
            ends[kind][chain] = start + duration
            pipelines[kind][chain] = pipeline


def _check_complete(plan: Plan, columns: _Columns) -> Iterator[Violation]:
    """Every micro-batch has at every stage an F and either a B or an I and a W, all on one worker."""
    for stage in range(plan.problem.shape.num_stages):
        runs = [columns.pipeline[stage, kind] for kind in "FBIW"]
        for chain, (forward, fused, split, weight) in enumerate(zip(*runs, strict=True)):
            is_split = forward == split == weight and fused == _ABSENT
            is_fused = forward == fused and split == weight == _ABSENT
            if forward == _ABSENT or not (is_split or is_fused):
                yield _incomplete(stage, microbatch_of(plan.problem.shape, chain), (forward, fused, split, weight))


def _incomplete(stage: int, microbatch: MicroBatch, pipelines: tuple[int, int, int, int]) -> Violation:
    """The violation by the ops of one micro-batch at one stage, which run in these pipelines (F, B, I, W)."""
    name = f"{microbatch.index}@{microbatch.pipeline}"
    present = {kind: pipeline for kind, pipeline in zip("FBIW", pipelines, strict=True) if pipeline != _ABSENT}
    if set(present) not in ({"F", "B"}, {"F", "I", "W"}):
        has = " and ".join(f"{stage}{kind}{name}" for kind in present) or "nothing"
        needed = "but needs an F and either a B or an I and a W"
        return Violation("every op once", f"micro-batch {name} has {has} at stage {stage}, {needed}")
    where = ", ".join(f"{stage}{kind}{name} on {Worker(pipeline, stage)}" for kind, pipeline in present.items())
    why = "a micro-batch's ops at a stage share activations, so they stay on one worker"
    return Violation("one worker", f"{where}: {why}")


def _check_dependencies(plan: Plan, columns: _Columns) -> Iterator[Violation]:
    problem, num_stages = plan.problem, plan.problem.shape.num_stages
    for stage in range(num_stages):
        for kind in Kind:
            starts = columns.starts[stage, kind.value]
            if starts.count(_ABSENT) == len(starts):
                continue
            sample = Op(stage, kind, MicroBatch(0, 0))
            for before in needs(sample, num_stages):
                ready = _ready_times(columns, before, lag_us(before, sample, problem))
                if any(map(gt, ready, starts)):
                    yield from _late(plan, columns, sample, before, ready)


def _ready_times(columns: _Columns, before: Op, lag: int) -> list[int]:
    """For each chain, when the result of `before` is there; `_ABSENT` where it never runs."""
    ready = [end + lag if end != _ABSENT else _ABSENT for end in columns.ends[before.stage, before.kind.value]]
    if before.kind is Kind.I:
        fused = columns.ends[before.stage, Kind.B.value]
        ready = [end + lag if end != _ABSENT else split for end, split in zip(fused, ready, strict=True)]
    return ready


def _late(plan: Plan, columns: _Columns, sample: Op, before: Op, ready: list[int]) -> Iterator[Violation]:
    why = {Kind.F: "an op follows its forward", Kind.I: "a gradient follows the one it is made from"}[before.kind]
    starts, fused = columns.starts[sample.stage, sample.kind.value], columns.starts[before.stage, Kind.B.value]
    for chain, (known, start) in enumerate(zip(ready, starts, strict=True)):
        if start != _ABSENT and known > start:
            microbatch = microbatch_of(plan.problem.shape, chain)
            kind = Kind.B if before.kind is Kind.I and fused[chain] != _ABSENT else before.kind
            op, first = Op(sample.stage, sample.kind, microbatch), Op(before.stage, kind, microbatch)
            yield Violation("order", f"{op} starts at {start} µs, but the result of {first} is there at {known} µs: {why}")
