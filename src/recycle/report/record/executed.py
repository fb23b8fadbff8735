"""The iterations of a run beside its plan: when each began at every stage, how long it took, and where the time went.

The first iteration, in which everything warms up, is not counted where there is another; neither is one that is not whole,
because the run was cut off in it, or one that went by the plan of another epoch. Ops in vain, of an attempt that was begun again
because the step before it was taken back, are neither busy time nor bubble.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from recycle.core.cluster import Worker
from recycle.core.errors import ForeignPlan, UserError
from recycle.core.events.record import OPTIMIZER, REDUCE
from recycle.core.op import Kind, Op
from recycle.core.plans.plan import Plan, Row, microbatch_of
from recycle.report.record.run_columns import Bools, Ints, Ops
from recycle.report.timeline.timeline import Span

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class BubbleShare:
    """Where the time of one worker went; what no part fills is bubble."""

    worker: Worker
    span_us: int
    busy_us: int
    reduce_us: int
    optimizer_us: int
    in_vain_us: int = 0

    @property
    def bubble_us(self) -> int:
        return self.span_us - self.busy_us - self.reduce_us - self.optimizer_us - self.in_vain_us

    @property
    def bubble(self) -> float:
        return self.bubble_us / self.span_us


def bubble_share(shares: Sequence[BubbleShare]) -> float:
    """The share of all these workers' time together in which they computed nothing and neither reduced nor stepped."""
    return sum(share.bubble_us for share in shares) / sum(share.span_us for share in shares)


def planned_shares(plan: Plan) -> list[BubbleShare]:
    """Where the time of each live worker goes in one period, as planned."""
    problem, made = plan.problem, []
    for row in plan.rows:
        stage = row.worker.stage
        busy = sum(row.kinds.count(kind.value) * problem.duration_us(stage, kind) for kind in Kind)
        optimizer_us = problem.profile.stages[stage].optimizer_us
        made.append(BubbleShare(row.worker, plan.period_us, busy, problem.reduce_us(stage), optimizer_us))
    return made


class Executed:
    """The iterations of a run beside its plan: when each began at every stage, how long it took, where the time went."""

    def __init__(
        self,
        plan: Plan,
        ops: Ops,
        pauses: Sequence[Span] = (),
        has_epochs: bool = False,
        mine: Collection[int] | None = None,
    ) -> None:
        """`pauses` are when nobody trained: what an iteration shares with one of them is no bubble, and is not counted at all.

        A run that has epochs went by other plans too: iterations that did are left out, where else they would be refused. `mine`
        are those that went by this plan; where that is not known, those that hold no op but of its rows.
        """
        self.elsewhere: tuple[int, ...] = ()
        if (has_epochs or mine is not None) and len(ops):
            ops, self.elsewhere = _split_by_plan(plan, ops, mine)
        _refuse_other_plan(plan, ops)
        self.plan, self._ops = plan, ops
        self._stage = np.array([Worker.parse(name).stage for name in ops.workers])[ops.worker]
        kinds = ["" if text in (REDUCE, OPTIMIZER) else Op.parse(text).kind.value for text in ops.texts]
        self._kind = np.array(kinds)[ops.what]
        self._counts = ~ops.in_vain
        self._numbers, self._place = np.unique(ops.iteration, return_inverse=True)
        self._is_whole = self._find_whole()
        if not self._is_whole.any():
            raise UserError("the record holds no whole iteration: the run was cut off before the first one ended; train longer")
        first, last = self._spans()
        self._windows, self._has_next = self._find_windows(first, last)
        self._lengths, self._has_length = self._find_lengths(last.max(axis=1))
        self._is_calm = self._find_calm(pauses)
        if self.slowdown() == 0:
            raise UserError("the record is corrupt: its ops took no time at all")

    def _find_whole(self) -> Bools:
        counted = self._counts & (self._kind != "")
        whole: Bools = np.bincount(self._place[counted], minlength=len(self._numbers)) == self.plan.num_ops
        return whole

    def _spans(self) -> tuple[Ints, Ints]:
        """By iteration and stage, when what counts began and when it ended; for a synchronous plan all stages have the same."""
        shape = len(self._numbers), self.plan.problem.shape.num_stages
        first, last = np.full(shape, _NEVER), np.zeros(shape, dtype=np.int64)
        where = self._place[self._counts], self._stage[self._counts]
        np.minimum.at(first, where, self._ops.start_us[self._counts])
        np.maximum.at(last, where, self._ops.end_us[self._counts])
        if not self.plan.problem.techniques.staggered:
            is_there = (first < _NEVER).all(axis=1, keepdims=True)
            first = np.broadcast_to(np.where(is_there, first.min(axis=1, keepdims=True), _NEVER), shape)
            last = np.broadcast_to(last.max(axis=1, keepdims=True), shape)
        return first, last

    def _find_windows(self, first: Ints, last: Ints) -> tuple[Ints, Bools]:
        """From the start of an iteration to that of the next; where there is none, as long as the longest stage took."""
        follows = np.append(np.diff(self._numbers) == 1, False)
        follows[:-1] &= (first[1:] < _NEVER).all(axis=1)
        begun = np.where(first < _NEVER, first, 0)
        after = begun + (last - begun).max(axis=1, keepdims=True)
        after[:-1] = np.where(follows[:-1, None], first[1:], after[:-1])
        return np.stack([begun, after], axis=2), follows

    def _find_lengths(self, completed: Ints) -> tuple[Ints, Bools]:
        """From the end of the iteration before to that of each; where that is unknown, from its own start."""
        lengths = completed - self._windows[:, :, 0].min(axis=1)
        is_known = np.append(False, np.diff(self._numbers) == 1) & self._is_whole
        is_known[1:] &= self._is_whole[:-1]
        lengths[1:] = np.where(is_known[1:], np.diff(completed), lengths[1:])
        return lengths, is_known

    def _find_calm(self, pauses: Sequence[Span]) -> Bools:
        """Say in which iterations' windows there is no pause."""
        first, last = self._windows[:, :, 0].min(axis=1), self._windows[:, :, 1].max(axis=1)
        calm = np.ones(len(first), dtype=np.bool_)
        for begin, end in pauses:
            calm &= (last <= begin) | (end <= first)
        return calm

    @property
    def whole(self) -> tuple[int, ...]:
        """The iterations of which the record holds every op."""
        return tuple(self._numbers[self._is_whole].tolist())

    def windows(self, iteration: int) -> tuple[Span, ...]:
        """By stage, when a whole iteration began and when the next one did."""
        return tuple((first, last) for first, last in self._windows[self._place_of(iteration)].tolist())

    def length_us(self, iteration: int) -> int:
        """The time from the end of the iteration before to the end of this one, which must be whole."""
        return int(self._lengths[self._place_of(iteration)])

    def _place_of(self, iteration: int) -> int:
        if iteration not in self.whole:
            if iteration in self.elsewhere:
                raise UserError(f"iteration {iteration} went by the plan of another epoch: give that plan to draw it")
            raise UserError(_not_whole(iteration, self.whole, iteration in self._numbers))
        return int(np.searchsorted(self._numbers, iteration))

    @cached_property
    def middle(self) -> int:
        """The iteration to look at: of median length, and where there is one, with a whole one before it and one after."""
        inner = self._is_whole & self._has_next
        inner[1:] &= self._is_whole[:-1] & self._has_next[:-1]
        inner[:1] = False
        choices = next(mask for mask in (inner, self._is_whole & self._has_next, self._is_whole) if mask.any())
        places = np.flatnonzero(choices)
        away = np.abs(self._lengths[places] - np.median(self._lengths[places]))
        nearest = np.flatnonzero(away == away.min())
        best = nearest[np.argmin(np.abs(nearest - (len(places) - 1) / 2))]
        return int(self._numbers[places[best]])

    @property
    def _steady(self) -> Bools:
        """The iterations that count: whole, and not the first where there is another."""
        steady = self._is_whole.copy()
        if steady.sum() > 1:
            steady[np.argmax(steady)] = False
        return steady

    @cached_property
    def times_us(self) -> dict[int, int]:
        """By iteration, the time between the ends of two whole ones in a row; where there are no two, that of the first alone."""
        chosen = self._has_length if self._has_length.any() else self._numbers == self.whole[0]
        return dict(zip(self._numbers[chosen].tolist(), self._lengths[chosen].tolist(), strict=True))

    @cached_property
    def _ran(self) -> dict[str, tuple[Ints, Ints]]:
        """By kind, and then by iteration that counts: what its ops took together, and what the plan gives them."""
        problem, lengths = self.plan.problem, self._ops.end_us - self._ops.start_us
        made = {}
        for kind in Kind:
            costs = np.array([problem.duration_us(stage, kind) for stage in range(problem.shape.num_stages)])
            chosen = self._counts & (self._kind == kind.value)
            sums = (_sums(self._place, times, chosen, len(self._numbers)) for times in (lengths, costs[self._stage]))
            measured, planned = (times[self._steady] for times in sums)
            made[kind.value] = measured, planned
        return made

    def slowdown(self, kinds: str = "FBIW") -> float:
        """How many times as long as planned the ops of these kinds took, in a median iteration; nan where there are none.

        Every iteration by itself, because a few that something else held up would spoil what all of them add up to.
        """
        measured, planned = (np.sum([self._ran[kind][which] for kind in kinds], axis=0) for which in (0, 1))
        return float(np.median(measured / planned)) if planned.all() else float("nan")

    @cached_property
    def promised_us(self) -> float:
        """The period that the plan promises at the speed at which ops ran."""
        return self.plan.period_us * self.slowdown()

    @cached_property
    def shares(self) -> list[BubbleShare]:
        """Where the time of each live worker went, over the windows without a pause that a next iteration closes, if any.

        A reduction begins when the last worker of its stage has come to it; until then the others wait, and that is bubble.
        """
        steady, closed = self._steady, self._steady & self._has_next & self._is_calm
        frame = closed if closed.any() else steady
        ops, lengths = self._ops, self._ops.end_us - self._ops.start_us
        counted = self._counts & frame[self._place]
        what = [text if text in (REDUCE, OPTIMIZER) else "op" for text in ops.texts]
        is_a = {look: counted & np.array([one == look for one in what])[ops.what] for look in ("op", REDUCE, OPTIMIZER)}
        in_vain = ops.in_vain & np.isin(ops.iteration - 1, self._numbers[frame])  # it ran while the step before was not final
        spans = (self._windows[frame, :, 1] - self._windows[frame, :, 0]).sum(axis=0)
        parts = [
            self._by_worker(lengths, is_a["op"]),
            self._by_worker(np.maximum(0, ops.end_us - np.maximum(ops.start_us, self._joined(is_a[REDUCE]))), is_a[REDUCE]),
            self._by_worker(lengths, is_a[OPTIMIZER]),
            self._by_worker(lengths, in_vain),
        ]
        return [
            BubbleShare(row.worker, int(spans[row.worker.stage]), *(part.get(str(row.worker), 0) for part in parts))
            for row in self.plan.rows
        ]

    def _by_worker(self, times_us: Ints, chosen: Bools) -> dict[str, int]:
        sums = _sums(self._ops.worker, times_us, chosen, len(self._ops.workers))
        return dict(zip(self._ops.workers, sums.tolist(), strict=True))

    def _joined(self, is_reduce: Bools) -> Ints:
        """For each event, when the last worker of its stage came to the reduction of its iteration."""
        ops, num = self._ops, len(self._numbers)
        came = np.full((num, len(ops.workers)), _NEVER)
        np.minimum.at(came, (self._place[is_reduce], ops.worker[is_reduce]), ops.start_us[is_reduce])
        last = np.zeros((num, self.plan.problem.shape.num_stages), dtype=np.int64)
        stages = np.array([Worker.parse(name).stage for name in ops.workers])
        np.maximum.at(last, (np.arange(num)[:, None], stages[None, :]), np.where(came < _NEVER, came, 0))
        joined: Ints = last[self._place, self._stage]
        return joined

    @cached_property
    def taken_back(self) -> tuple[int, ...]:
        """The iterations whose step was taken back, as far as ops of the next one had run in vain by then."""
        return tuple((np.unique(self._ops.iteration[self._ops.in_vain]) - 1).tolist())

    @property
    def num_in_vain(self) -> int:
        return int(self._ops.in_vain.sum())

    @property
    def in_vain_us(self) -> int:
        return int((self._ops.end_us - self._ops.start_us)[self._ops.in_vain].sum())


def _sums(places: Ints, times_us: Ints, chosen: Bools, num: int) -> Ints:
    """What the chosen times add up to in each of `num` places."""
    sums = np.zeros(num, dtype=np.int64)
    np.add.at(sums, places[chosen], times_us[chosen])
    return sums


def _not_whole(iteration: int, whole: Sequence[int], is_begun: bool) -> str:
    among = f"{whole[0]} to {whole[-1]}" if len(whole) > 1 else f"{whole[0]} only"
    problem = "is not whole in the record: the run was cut off in it" if is_begun else "is not in the record"
    return f"iteration {iteration} {problem}; whole are {among}"


def _refuse_other_plan(plan: Plan, ops: Ops) -> None:
    """Raise unless every op of the record is in the row of its worker."""
    if len(ops) == 0:
        raise UserError("the record is empty: it holds no op that a worker ran, so there is nothing to report")
    rows = {str(row.worker): row for row in plan.rows}
    for name in ops.workers:
        if name not in rows:
            raise ForeignPlan(f"{name} ran ops in this record, but the plan has no row for it: give the plan of this run")
    strange = np.flatnonzero(~_is_in(plan, ops))
    if strange.size:
        name, text = min((ops.workers[ops.worker[place]], ops.texts[ops.what[place]]) for place in strange.tolist())
        raise ForeignPlan(f"{name} ran {text} in this record, but the plan does not: give the plan of this run")


def _split_by_plan(plan: Plan, ops: Ops, known: Collection[int] | None) -> tuple[Ops, tuple[int, ...]]:
    """Return the ops of the iterations that went by this plan, and the numbers of those that went by another."""
    in_row = _is_in(plan, ops)
    others = np.unique(ops.iteration[~ops.in_vain & (~in_row if known is None else ~np.isin(ops.iteration, list(known)))])
    # What was begun in vain may have been begun by another plan.
    mine = ops.chosen(~np.isin(ops.iteration, others) & (in_row | (~ops.in_vain & (known is not None))))
    if len(mine) == 0:
        raise ForeignPlan(
            "no iteration of this record went by this plan: workers came or went before the first one ended; "
            "give the plan of another epoch"
        )
    return mine, tuple(others.tolist())


def _is_in(plan: Plan, ops: Ops) -> Bools:
    """Say of each op whether it is in the row of its worker."""
    known = {str(row.worker): _texts(plan, row) for row in plan.rows}
    pairs, place = np.unique(ops.worker * len(ops.texts) + ops.what, return_inverse=True)
    named = ((ops.workers[pair // len(ops.texts)], ops.texts[pair % len(ops.texts)]) for pair in pairs.tolist())
    is_known = np.array([text in known.get(name, ()) for name, text in named], dtype=np.bool_)
    in_row: Bools = is_known[place]
    return in_row


def _texts(plan: Plan, row: Row) -> set[str]:
    """What the worker of a row runs in an iteration."""
    shape, stage = plan.problem.shape, row.worker.stage
    chains = zip(row.kinds, row.chains, strict=True)
    return {REDUCE, OPTIMIZER, *(str(Op(stage, Kind(kind), microbatch_of(shape, chain))) for kind, chain in chains)}
