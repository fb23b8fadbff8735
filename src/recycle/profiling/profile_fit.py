"""What workers did, read as a profile: durations from the spans of a rehearsal.

- An op takes from its start until its worker is free for the next one: sending what it made is part of it, waiting is not.
  Taking a message that is there already is part of it, too.
- A message takes from the moment its sender is free to the start of the op that waited for it.
- While others compute, an op takes longer (`crowd`): so it costs what it takes in the usual crowd, that of all pipelines. Those
  who reduce and step count among the others.
- Workers need not be equally fast, though they do the same: each has a factor of its own, as long as a play lasts. What of their
  differences the variation of single ops explains is no factor.
- A reduction takes from its last peer's arrival to its end; a step from there until the worker is free for the next iteration. It
  is that of the slowest peer: one of them has more to do, because it speaks for all.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import mul
from statistics import fmean, median, pvariance, quantiles

from recycle.core.cluster import Shape, Worker
from recycle.core.events.record import REDUCE
from recycle.core.op import Kind, Op
from recycle.core.plans.rules import needs
from recycle.core.profile import QUARTILE, Link, Profile, Spread, StageProfile, Taken
from recycle.profiling.contention import Contenders, Timed, What, costs_and_levels
from recycle.profiling.plan_runner import PlanRun, WeightState
from recycle.runtime.compute.stage_costs import StageBytes
from recycle.runtime.execute.spans import Span

# A message that was sent so much earlier than its receiver was free for it was there already.
_LONG_US = 50_000
_FREE = Link(bytes_per_us=1e9)
# So many factors of workers are kept: enough to draw from, and few enough to read.
_NUM_FACTORS = 25


@dataclass(frozen=True, slots=True)
class _Ran:
    """An op as it ran, and when its worker was free again."""

    span: Span
    free_us: int

    @property
    def took_us(self) -> int:
        return self.free_us - self.span.start_us


@dataclass(slots=True)
class ProfileFit:
    """Durations in µs, of all workers of a shape; beside one, at most `most_others` compute. `ops` are by worker and play."""

    shape: Shape
    most_others: int
    ops: list[list[Timed]] = field(default_factory=list)
    receives: list[int] = field(default_factory=list)
    ways: list[int] = field(default_factory=list)
    reductions: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    steps: defaultdict[Worker, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add(self, played: Mapping[Worker, PlanRun], first: int) -> None:
        """Read the iterations from number `first` on."""
        ran = {worker: [pair for spans in told.spans[first:] for pair in _ran(spans)] for worker, told in played.items()}
        busy_us = list[tuple[int, int]]()
        for iteration in range(min(len(told.spans) for told in played.values())):
            spans = {worker: told.spans[iteration] for worker, told in played.items()}
            busy_us += self._busy_us(spans)  # also before the first: some are still in it while others go on
            if iteration >= first:
                self._add_ways({op: one for own in spans.values() for op, one in _ran(own)})
                self._add_reductions(spans)
        crowd = Contenders(busy_us)
        for worker, told in played.items():
            for before, after in pairwise(told.spans[first:]):
                self.steps[worker].append(after[0].asked_us - _reduction(before).end_us)
            self.ops.append(
                [
                    Timed((op.stage, op.kind), one.took_us, crowd.shares(one.span.start_us, one.free_us, self.most_others))
                    for op, one in ran[worker]
                ]
            )

    def _add_ways(self, ran: Mapping[Op, _Ran]) -> None:
        for op, one in ran.items():
            for before in needs(op, self.shape.num_stages):
                made = ran.get(before) or ran.get(replace(before, kind=Kind.B))
                if before.stage == op.stage or made is None:
                    continue
                asked_us, start_us = one.span.asked_us, one.span.start_us
                if asked_us < made.span.end_us:  # it waited, and for nothing else
                    self.ways.append(start_us - made.free_us)
                elif asked_us > made.span.end_us + _LONG_US:
                    self.receives.append(start_us - asked_us)

    def _add_reductions(self, spans: Mapping[Worker, Sequence[Span]]) -> None:
        for stage in range(self.shape.num_stages):
            own = [_reduction(told) for worker, told in spans.items() if worker.stage == stage]
            last_us = max(span.start_us for span in own)
            self.reductions[stage] += [span.end_us - last_us for span in own]

    def _busy_us(self, spans: Mapping[Worker, Sequence[Span]]) -> Iterator[tuple[int, int]]:
        """When workers were busy in an iteration: with ops, and from the arrival of the last peer on with reduction and step."""
        for stage in range(self.shape.num_stages):
            own = [told for worker, told in spans.items() if worker.stage == stage]
            last_us = max(_reduction(told).start_us for told in own)
            for told in own:
                yield from ((one.span.start_us, one.free_us) for _, one in _ran(told))
                yield last_us, told[-1].end_us

    def medians(self) -> dict[What, float]:
        """What ops take, whoever runs them, and in whatever crowd."""
        times: defaultdict[What, list[int]] = defaultdict(list)
        for op in self.all_ops():
            times[op.what].append(op.took_us)
        return {what: median(took) for what, took in times.items()}

    def all_ops(self) -> list[Timed]:
        return [op for own in self.ops for op in own]

    def unrest(self, before: Mapping[What, float]) -> float:
        """By how much medians have moved since at most, as a share."""
        return max(abs(now / before[what] - 1) if what in before else 1.0 for what, now in self.medians().items())

    def profile(
        self,
        sizes: Sequence[StageBytes],
        states: Mapping[int, WeightState],
        ping_us: float,
        taken: Taken,
        others: Sequence["ProfileFit"] = (),
    ) -> Profile:
        """The profile; `ping_us` is what the smallest message takes, `others` are readings of fewer pipelines at work."""
        receive_us = median(self.receives) if self.receives else 0.0
        ops = [op for reading in (self, *others) for op in reading.all_ops()]
        costs, levels = costs_and_levels(ops, self.all_ops())
        over = Over(self.ops, costs, levels)
        spreads = over.spreads()
        stages = tuple(self._stage(stage, own, states[stage], costs, spreads, receive_us) for stage, own in enumerate(sizes))
        return Profile(
            stages,
            stage_link=self._stage_link(stages, ping_us, receive_us),
            peer_link=self._peer_link(stages, ping_us),
            name=f"{taken.model}, measured with {self.shape.num_workers} workers on {taken.machine}",
            taken=taken,
            contention=tuple(round(level, 4) for level in levels),
            factors=tuple(round(factor, 4) for factor in _thinned(sorted(over.lasting_factors()))),
        )

    def _stage(
        self,
        stage: int,
        sizes: StageBytes,
        state: WeightState,
        costs: Mapping[What, float],
        spreads: Mapping[What, int],
        receive_us: float,
    ) -> StageProfile:
        def took_us(kind: Kind) -> int:
            takes = {Kind.F: stage > 0, Kind.W: False}.get(kind, stage < self.shape.num_stages - 1)
            return max(1, round(costs[stage, kind] + receive_us * takes))

        input_us = took_us(Kind.I)
        return StageProfile(
            forward_us=took_us(Kind.F),
            input_us=input_us,
            weight_us=took_us(Kind.W),
            fused_us=max(input_us, took_us(Kind.B)),
            optimizer_us=round(max(median(took) for worker, took in self.steps.items() if worker.stage == stage)),
            activation_bytes=sizes.activation_bytes,
            weight_held_bytes=sizes.weight_held_bytes,
            static_bytes=state.static_bytes,
            gradient_bytes=state.gradient_bytes,
            output_bytes=sizes.output_bytes,
            spread=Spread(*(spreads[stage, kind] for kind in (Kind.F, Kind.I, Kind.W, Kind.B))),
        )

    def _stage_link(self, stages: Sequence[StageProfile], ping_us: float, receive_us: float) -> Link:
        if not self.ways:
            return _FREE
        size_bytes = median(stage.output_bytes for stage in stages[:-1])
        return _link(max(0.0, median(self.ways) - receive_us), ping_us, size_bytes)

    def _peer_link(self, stages: Sequence[StageProfile], ping_us: float) -> Link:
        """The link over which a ring of these peers would take what the reductions took."""
        num_peers = self.shape.num_pipelines
        if num_peers < 2:
            return _FREE
        num_steps = 2 * (num_peers - 1)
        took_us = median(median(times) for times in self.reductions.values())
        return _link(took_us / num_steps, ping_us, median(stage.gradient_bytes for stage in stages) / num_peers)


class Over:
    """What ops took over what they cost in their crowd: `factors` are how much slower each worker was in each play.

    A machine need not treat all alike.
    """

    def __init__(self, ops: Sequence[Sequence[Timed]], costs: Mapping[What, float], levels: Sequence[float]) -> None:
        self._costs = costs
        self._ratios = [
            [(op.what, op.took_us / costs[op.what] / sum(map(mul, op.shares, levels))) for op in own] for own in ops if own
        ]
        self.factors = [median(ratio for _, ratio in own) for own in self._ratios]

    def lasting_factors(self) -> list[float]:
        """The factors without what they owe to chance: even equal workers have different medians of ops that vary."""
        variance = pvariance(self.factors, 1.0) if self.factors else 0.0
        if not variance:
            return self.factors
        beside = [abs(ratio / factor - 1) for own, factor in zip(self._ratios, self.factors, strict=True) for _, ratio in own]
        # So much a median of as many values varies, if they are normal.
        chance = math.pi / 2 * (median(beside) / QUARTILE) ** 2 / fmean(map(len, self._ratios))
        share = math.sqrt(max(0.0, 1 - chance / variance))
        return [1 + share * (factor - 1) for factor in self.factors]

    def spreads(self) -> dict[What, int]:
        """How far the durations of one worker lie apart: half of what is between their quartiles."""
        ratios: defaultdict[What, list[float]] = defaultdict(list)
        for own, factor in zip(self._ratios, self.factors, strict=True):
            for what, ratio in own:
                ratios[what].append(ratio / factor)
        quartiles = {what: quantiles(own, n=4) if len(own) > 1 else (1, 1, 1) for what, own in ratios.items()}
        return {what: round((high - low) / 2 * self._costs[what]) for what, (low, _, high) in quartiles.items()}


def _link(took_us: float, ping_us: float, size_bytes: float) -> Link:
    """The link over which the smallest message takes `ping_us`, and one of this size `took_us`."""
    latency_us = min(math.floor(took_us), round(ping_us))
    rest_us = took_us - latency_us
    return Link(latency_us, size_bytes / rest_us if rest_us > 0 and size_bytes else _FREE.bytes_per_us)


def _ran(spans: Sequence[Span]) -> Iterator[tuple[Op, _Ran]]:
    for span, following in pairwise(spans):
        if not span.is_op:
            return
        yield Op.parse(span.label, 0), _Ran(span, following.asked_us if following.is_op else following.start_us)


def _reduction(spans: Sequence[Span]) -> Span:
    return next(span for span in spans if span.label == REDUCE)


def _thinned(values: Sequence[float]) -> Sequence[float]:
    """So few of sorted values that they can be kept, evenly chosen."""
    if len(values) <= _NUM_FACTORS:
        return values
    return [values[round(number * (len(values) - 1) / (_NUM_FACTORS - 1))] for number in range(_NUM_FACTORS)]
