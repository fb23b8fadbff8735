"""ProfileFit: a profile from the spans of a rehearsal. The guide "Measure" says how each entry is measured.

- Taking a message that has arrived already is part of an op. A message takes from the moment its sender is free to the start of
  the op that waited for it.
- An op costs its duration under the usual contention, that of all pipelines. Workers that reduce or step count among the others.
- Each worker has a factor of its own, as long as a run lasts. The part of their differences that the variation of single ops
  explains is no factor.
- The profile has the step of the slowest peer: the first peer has more to do, because it puts in the norm of the stage. A lean
  step is computed twice, the second time in the next iteration: both count.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import mul
from statistics import fmean, median, pvariance, quantiles
from typing import NamedTuple

from recycle.core.cluster import Shape, Worker
from recycle.core.events.op_columns import REDUCE
from recycle.core.op import Kind, Op
from recycle.core.plans.rules import needs
from recycle.core.profile import FREE_LINK, QUARTILE, Link, Profile, Spread, StageProfile, Taken
from recycle.profiling.contention import Concurrency, OpType, TimedOp, costs_and_levels
from recycle.profiling.plan_runner import PlanRun, StateBytes
from recycle.runtime.compute.stage_bytes import StageBytes
from recycle.runtime.execute.spans import Span

# A message that was sent so much earlier than its receiver was free for it had arrived already.
_ARRIVED_US = 50_000
# So many factors of workers are kept: enough to draw from, and few enough to read.
_NUM_FACTORS = 25


class _OpRun(NamedTuple):
    """The span of an op, and when its worker was free again."""

    span: Span
    free_us: int


@dataclass(slots=True)
class ProfileFit:
    """Durations of all workers of a shape; beside one, at most `most_others` compute. `ops` are by worker and run."""

    shape: Shape
    most_others: int
    ops: list[list[TimedOp]] = field(default_factory=list)
    receives_us: list[int] = field(default_factory=list)
    messages_us: list[int] = field(default_factory=list)
    reductions_us: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    steps_us: defaultdict[Worker, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add(self, runs: Mapping[Worker, PlanRun], first: int) -> None:
        """Add the durations of a run, from iteration `first` on."""
        busy_us = list[tuple[int, int]]()
        for iteration in range(min(len(run.spans) for run in runs.values())):
            spans = {worker: run.spans[iteration] for worker, run in runs.items()}
            arrivals_us = _last_arrivals_us(spans)
            busy_us += _busy_us(spans, arrivals_us)  # also before the first: some are still in it while others go on
            if iteration >= first:
                self._add_messages({op: run for own in spans.values() for op, run in _op_runs(own)})
                for worker, of_worker in spans.items():
                    self.reductions_us[worker.stage].append(_reduction(of_worker).end_us - arrivals_us[worker.stage])
        concurrency = Concurrency(busy_us)
        for worker, own in runs.items():
            for before, after in pairwise(own.spans[first:]):
                again_us = sum(span.end_us - span.start_us for span in _settling(after))
                # A worker that computes its step again before any op was free when the step had ended.
                free_us = after[0].asked_us if after[0].is_op else before[-1].end_us
                self.steps_us[worker].append(free_us - _reduction(before).end_us + again_us)
            op_runs = [op_run for each in own.spans[first:] for op_run in _op_runs(each)]
            self.ops.append([self._timed(op, run, concurrency) for op, run in op_runs])

    def _timed(self, op: Op, run: _OpRun, concurrency: Concurrency) -> TimedOp:
        shares = concurrency.shares(run.span.start_us, run.free_us, self.most_others)
        return TimedOp((op.stage, op.kind), run.free_us - run.span.start_us, shares)

    def _add_messages(self, runs: Mapping[Op, _OpRun]) -> None:
        for op, run in runs.items():
            for before in needs(op, self.shape.num_stages):
                made = runs.get(before) or runs.get(replace(before, kind=Kind.B))
                if before.stage == op.stage or made is None:
                    continue
                asked_us, start_us = run.span.asked_us, run.span.start_us
                if asked_us < made.span.end_us:  # it waited, and for nothing else
                    self.messages_us.append(start_us - made.free_us)
                elif asked_us > made.span.end_us + _ARRIVED_US:
                    self.receives_us.append(start_us - asked_us)

    def medians(self) -> dict[OpType, float]:
        """The median duration of each type of op, over all workers and any contention."""
        times: defaultdict[OpType, list[int]] = defaultdict(list)
        for op in self.all_ops():
            times[op.type].append(op.took_us)
        return {op_type: median(took) for op_type, took in times.items()}

    def all_ops(self) -> list[TimedOp]:
        return [op for own in self.ops for op in own]

    def median_change(self, before: Mapping[OpType, float]) -> float:
        """The largest change of a median since `before`, as a share."""
        return max(abs(now / before[type_] - 1) if type_ in before else 1.0 for type_, now in self.medians().items())

    def profile(
        self,
        sizes: Sequence[StageBytes],
        states: Mapping[int, StateBytes],
        ping_us: float,
        taken: Taken,
        others: Sequence["ProfileFit"] = (),
    ) -> Profile:
        """The profile; `ping_us` is the time of the smallest message, `others` are fits of runs of fewer pipelines."""
        receive_us = median(self.receives_us) if self.receives_us else 0.0
        ops = [op for fit in (self, *others) for op in fit.all_ops()]
        costs, levels = costs_and_levels(ops, self.all_ops())
        relative = RelativeTimes(self.ops, costs, levels)
        spreads = relative.spreads()
        stages = tuple(self._stage(stage, own, states[stage], costs, spreads, receive_us) for stage, own in enumerate(sizes))
        return Profile(
            stages,
            stage_link=self._stage_link(stages, ping_us, receive_us),
            peer_link=self._peer_link(stages, ping_us),
            name=f"{taken.model}, measured with {self.shape.num_workers} workers on {taken.machine}",
            taken=taken,
            contention=tuple(round(level, 4) for level in levels),
            factors=tuple(round(factor, 4) for factor in _thinned(sorted(relative.lasting_factors()))),
        )

    def _stage(
        self,
        stage: int,
        sizes: StageBytes,
        state: StateBytes,
        costs: Mapping[OpType, float],
        spreads: Mapping[OpType, int],
        receive_us: float,
    ) -> StageProfile:
        def took_us(kind: Kind) -> int:
            receives = {Kind.F: stage > 0, Kind.W: False}.get(kind, stage < self.shape.num_stages - 1)
            return max(1, round(costs[stage, kind] + receive_us * receives))

        input_us = took_us(Kind.I)
        return StageProfile(
            forward_us=took_us(Kind.F),
            input_us=input_us,
            weight_us=took_us(Kind.W),
            fused_us=max(input_us, took_us(Kind.B)),
            optimizer_us=round(max(median(took) for worker, took in self.steps_us.items() if worker.stage == stage)),
            spread=Spread(*(spreads[stage, kind] for kind in (Kind.F, Kind.I, Kind.W, Kind.B))),
            **sizes._asdict(),
            **state._asdict(),
        )

    def _stage_link(self, stages: Sequence[StageProfile], ping_us: float, receive_us: float) -> Link:
        if not self.messages_us:
            return FREE_LINK
        size_bytes = median(stage.output_bytes for stage in stages[:-1])
        return _link(max(0.0, median(self.messages_us) - receive_us), ping_us, size_bytes)

    def _peer_link(self, stages: Sequence[StageProfile], ping_us: float) -> Link:
        """The link over which a ring all-reduce of these peers would take as long as the reductions took."""
        num_peers = self.shape.num_pipelines
        if num_peers < 2:
            return FREE_LINK
        num_steps = 2 * (num_peers - 1)
        took_us = median(median(times) for times in self.reductions_us.values())
        return _link(took_us / num_steps, ping_us, median(stage.gradient_bytes for stage in stages) / num_peers)


class RelativeTimes:
    """Durations of ops over their costs under contention. `factors` are the slowdowns of each worker in each run.

    A machine need not treat all workers alike.
    """

    def __init__(self, ops: Sequence[Sequence[TimedOp]], costs: Mapping[OpType, float], levels: Sequence[float]) -> None:
        self._costs = costs
        self._ratios = [
            [(op.type, op.took_us / costs[op.type] / sum(map(mul, op.shares, levels))) for op in own] for own in ops if own
        ]
        self.factors = [median(ratio for _, ratio in own) for own in self._ratios]

    def lasting_factors(self) -> list[float]:
        """The factors without their random part: even equal workers have different medians of ops that vary."""
        variance = pvariance(self.factors, 1.0) if self.factors else 0.0
        if not variance:
            return self.factors
        beside = [abs(ratio / factor - 1) for own, factor in zip(self._ratios, self.factors, strict=True) for _, ratio in own]
        # The variance of a median of as many values, if they are normal.
        random_variance = math.pi / 2 * (median(beside) / QUARTILE) ** 2 / fmean(map(len, self._ratios))
        share = math.sqrt(max(0.0, 1 - random_variance / variance))
        return [1 + share * (factor - 1) for factor in self.factors]

    def spreads(self) -> dict[OpType, int]:
        """The spread of the durations of one worker: half of the interquartile range."""
        ratios: defaultdict[OpType, list[float]] = defaultdict(list)
        for own, factor in zip(self._ratios, self.factors, strict=True):
            for op_type, ratio in own:
                ratios[op_type].append(ratio / factor)
        quartiles = {op_type: quantiles(own, n=4) if len(own) > 1 else (1, 1, 1) for op_type, own in ratios.items()}
        return {op_type: round((high - low) / 2 * self._costs[op_type]) for op_type, (low, _, high) in quartiles.items()}


def _link(took_us: float, ping_us: float, size_bytes: float) -> Link:
    """The link over which the smallest message takes `ping_us`, and one of this size `took_us`."""
    latency_us = min(math.floor(took_us), round(ping_us))
    rest_us = took_us - latency_us
    return Link(latency_us, size_bytes / rest_us if rest_us > 0 and size_bytes else FREE_LINK.bytes_per_us)


def _op_runs(spans: Sequence[Span]) -> Iterator[tuple[Op, _OpRun]]:
    for span, following in pairwise(spans):
        if span.is_op:
            yield Op.parse(span.label, 0), _OpRun(span, _free_us(span, following))


def _free_us(span: Span, following: Span) -> int:
    """When the worker of an op was free again. Before a step is settled it may have waited for the verdict."""
    if following.is_op:
        return following.asked_us
    return following.start_us if following.label == REDUCE else span.end_us


def _settling(spans: Sequence[Span]) -> Iterator[Span]:
    """The steps of the iteration before that were computed again in this one."""
    for span in spans:
        if span.label == REDUCE:
            return
        if not span.is_op:
            yield span


def _reduction(spans: Sequence[Span]) -> Span:
    return next(span for span in spans if span.label == REDUCE)


def _last_arrivals_us(spans: Mapping[Worker, Sequence[Span]]) -> dict[int, int]:
    """When the last peer of each stage began to reduce."""
    arrivals_us: dict[int, int] = {}
    for worker, own in spans.items():
        arrivals_us[worker.stage] = max(_reduction(own).start_us, arrivals_us.get(worker.stage, 0))
    return arrivals_us


def _busy_us(spans: Mapping[Worker, Sequence[Span]], arrivals_us: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """The times at which workers computed in an iteration: ops, and from the last peer's arrival on reduction and step."""
    for worker, own in spans.items():
        yield from ((run.span.start_us, run.free_us) for _, run in _op_runs(own))
        yield from ((span.start_us, span.end_us) for span in _settling(own))
        yield arrivals_us[worker.stage], own[-1].end_us


def _thinned(values: Sequence[float]) -> Sequence[float]:
    """At most _NUM_FACTORS of sorted values, evenly chosen, with both ends."""
    if len(values) <= _NUM_FACTORS:
        return values
    return [values[round(number * (len(values) - 1) / (_NUM_FACTORS - 1))] for number in range(_NUM_FACTORS)]
