"""The executed iterations of a run beside one plan: their start at every stage, their length, busy time and bubbles.

The first iteration, a warm-up, does not count if there is another; neither do incomplete iterations, nor iterations that were
executed by the plan of another epoch. Ops in vain, of an attempt that was repeated because the step before it was taken back, are
neither busy time nor bubble.
"""

from collections.abc import Collection, Sequence
from functools import cached_property

import numpy as np

from recycle.core.cluster import Worker
from recycle.core.errors import ForeignPlan, UserError
from recycle.core.events.op_columns import OPTIMIZER, REDUCE
from recycle.core.op import Kind, Op
from recycle.core.plans.plan import Plan, chain_of
from recycle.core.time_shares import TimeShares
from recycle.report.record.run_columns import Bools, Ints, Ops
from recycle.report.timeline.timeline import Span

_NEVER = np.iinfo(np.int64).max


def planned_shares(plan: Plan) -> list[TimeShares]:
    """Return the planned use of each live worker's time in one period."""
    problem, shares = plan.problem, []
    for row in plan.rows:
        stage = row.worker.stage
        finish_us = problem.reduce_us(stage), problem.optimizer_us(stage)
        shares.append(TimeShares(row.worker, plan.period_us, plan.busy_us(row), *finish_us))
    return shares


class Executed:
    """The iterations of a run that were executed by one plan."""

    def __init__(
        self,
        plan: Plan,
        ops: Ops,
        pauses: Sequence[Span] = (),
        has_epochs: bool = False,
        own: Collection[int] | None = None,
    ) -> None:
        """Select the iterations of `plan`: those in `own` or, if that is None, those with all ops in its rows.

        Iterations of other plans are left out if the run `has_epochs`, and refused otherwise. `pauses`, in which no worker
        trained, are neither busy time nor bubble.
        """
        self.of_other_plans: tuple[int, ...] = ()
        if (has_epochs or own is not None) and len(ops):
            ops, self.of_other_plans = _split_by_plan(plan, ops, own)
        _refuse_other_plan(plan, ops)
        self.plan, self._ops = plan, ops
        self._stage, self._kind = ops.stages[ops.worker], ops.kinds
        self._counts = ~ops.in_vain
        self._numbers, self._index = np.unique(ops.iteration, return_inverse=True)
        op_counts = np.bincount(self._index[self._counts & (self._kind != "")], minlength=len(self._numbers))
        self._is_whole: Bools = op_counts == plan.num_ops
        if not self._is_whole.any():
            raise UserError("the record holds no whole iteration: the run was cut off before the first one ended; train longer")
        first, last = self._spans()
        self._windows, self._has_next = self._find_windows(first, last)
        self._lengths, self._has_length = self._find_lengths(last.max(axis=1))
        self._is_undisturbed = self._find_undisturbed(pauses)
        if self.slowdown() == 0:
            raise UserError("the record is corrupt: its ops took no time at all")

    def _spans(self) -> tuple[Ints, Ints]:
        """The first start and last end by iteration and stage; in a synchronous plan they are the same for all stages."""
        shape = len(self._numbers), self.plan.problem.shape.num_stages
        first, last = np.full(shape, _NEVER), np.zeros(shape, dtype=np.int64)
        where = self._index[self._counts], self._stage[self._counts]
        np.minimum.at(first, where, self._ops.start_us[self._counts])
        np.maximum.at(last, where, self._ops.end_us[self._counts])
        if not self.plan.problem.techniques.staggered:
            is_known = (first < _NEVER).all(axis=1, keepdims=True)
            first = np.broadcast_to(np.where(is_known, first.min(axis=1, keepdims=True), _NEVER), shape)
            last = np.broadcast_to(last.max(axis=1, keepdims=True), shape)
        return first, last

    def _find_windows(self, first: Ints, last: Ints) -> tuple[Ints, Bools]:
        """From the start of an iteration to the start of the next; without a next one, as long as the longest stage."""
        follows = np.append(np.diff(self._numbers) == 1, False)
        follows[:-1] &= (first[1:] < _NEVER).all(axis=1)
        begun = np.where(first < _NEVER, first, 0)
        after = begun + (last - begun).max(axis=1, keepdims=True)
        after[:-1] = np.where(follows[:-1, None], first[1:], after[:-1])
        return np.stack([begun, after], axis=2), follows

    def _find_lengths(self, completed: Ints) -> tuple[Ints, Bools]:
        """From the end of the iteration before to the end of each; if that is unknown, from its own start."""
        lengths = completed - self._windows[:, :, 0].min(axis=1)
        is_known = np.append(False, np.diff(self._numbers) == 1) & self._is_whole
        is_known[1:] &= self._is_whole[:-1]
        lengths[1:] = np.where(is_known[1:], np.diff(completed), lengths[1:])
        return lengths, is_known

    def _find_undisturbed(self, pauses: Sequence[Span]) -> Bools:
        """Which iterations have no pause in their windows."""
        first, last = self._windows[:, :, 0].min(axis=1), self._windows[:, :, 1].max(axis=1)
        undisturbed = np.ones(len(first), dtype=np.bool_)
        for begin, end in pauses:
            undisturbed &= (last <= begin) | (end <= first)
        return undisturbed

    @property
    def whole(self) -> tuple[int, ...]:
        """The iterations of which the record holds every op."""
        return tuple(self._numbers[self._is_whole].tolist())

    def windows(self, iteration: int) -> tuple[Span, ...]:
        """By stage, the start of a complete iteration and of the next one."""
        return tuple((first, last) for first, last in self._windows[self._index_of(iteration)].tolist())

    def length_us(self, iteration: int) -> int:
        """The time from the end of the iteration before to the end of this one, which must be complete."""
        return int(self._lengths[self._index_of(iteration)])

    def _index_of(self, iteration: int) -> int:
        if iteration not in self.whole:
            if iteration in self.of_other_plans:
                raise UserError(f"iteration {iteration} was executed by the plan of another epoch: give that plan to draw it")
            whole, is_begun = self.whole, iteration in self._numbers
            problem = "is not whole in the record: the run was cut off in it" if is_begun else "is not in the record"
            among = f"{whole[0]} to {whole[-1]}" if len(whole) > 1 else f"{whole[0]} only"
            raise UserError(f"iteration {iteration} {problem}; whole are {among}")
        return int(np.searchsorted(self._numbers, iteration))

    @cached_property
    def middle(self) -> int:
        """The iteration to show: of median length and, if possible, between two complete iterations."""
        inner = self._is_whole & self._has_next
        inner[1:] &= self._is_whole[:-1] & self._has_next[:-1]
        inner[:1] = False
        choices = next(mask for mask in (inner, self._is_whole & self._has_next, self._is_whole) if mask.any())
        indices = np.flatnonzero(choices)
        distance = np.abs(self._lengths[indices] - np.median(self._lengths[indices]))
        nearest = np.flatnonzero(distance == distance.min())
        best = nearest[np.argmin(np.abs(nearest - (len(indices) - 1) / 2))]
        return int(self._numbers[indices[best]])

    @property
    def _steady(self) -> Bools:
        """The complete iterations without the first, if there is another."""
        steady = self._is_whole.copy()
        if steady.sum() > 1:
            steady[np.argmax(steady)] = False
        return steady

    @cached_property
    def times_us(self) -> dict[int, int]:
        """The time between the ends of two consecutive complete iterations; without such a pair, that of the first one."""
        chosen = self._has_length if self._has_length.any() else self._numbers == self.whole[0]
        return dict(zip(self._numbers[chosen].tolist(), self._lengths[chosen].tolist(), strict=True))

    @cached_property
    def _ran(self) -> dict[str, tuple[Ints, Ints]]:
        """By kind and counted iteration, the measured and the planned time of all ops together."""
        lengths, planned = self._ops.end_us - self._ops.start_us, self._planned_us
        found = {}
        for kind in Kind:
            chosen = self._counts & (self._kind == kind.value)
            sums = np.zeros((len(self._numbers), 2), dtype=np.int64)
            np.add.at(sums, self._index[chosen], np.stack([lengths, planned], axis=1)[chosen])
            found[kind.value] = sums[self._steady, 0], sums[self._steady, 1]
        return found

    @cached_property
    def _planned_us(self) -> Ints:
        """The planned duration of each executed op; 0 for reductions and steps."""
        ops, costs, shape = self._ops, self.plan.costs, self.plan.problem.shape
        is_op = np.isin(np.arange(len(ops.texts)), ops.what[self._kind != ""])
        pairs, where = np.unique(ops.what * len(ops.workers) + ops.worker, return_inverse=True)
        known = np.zeros(len(pairs), dtype=np.int64)
        for number, pair in enumerate(pairs.tolist()):
            what, worker = divmod(pair, len(ops.workers))
            if is_op[what]:
                op = Op.parse(ops.texts[what])
                known[number] = costs.duration_us(Worker.parse(ops.workers[worker]), op.kind, chain_of(shape, op.microbatch))
        planned: Ints = known[where]
        return planned

    def slowdown(self, kinds: str = "FBIW") -> float:
        """The measured over the planned time of the ops of these kinds: the median over iterations; nan without such ops.

        A median, so that a few disturbed iterations do not matter.
        """
        measured, planned = (np.sum([self._ran[kind][which] for kind in kinds], axis=0) for which in (0, 1))
        return float(np.median(measured / planned)) if planned.all() else float("nan")

    @cached_property
    def promised_us(self) -> float:
        """The period of the plan at the measured speed of the ops."""
        return self.plan.period_us * self.slowdown()

    @cached_property
    def shares(self) -> list[TimeShares]:
        """The use of each live worker's time, over the windows without a pause that the next iteration ends, if there are any.

        A reduction begins when the last worker of its stage arrives; the others' waiting time before is bubble.
        """
        steady, closed = self._steady, self._steady & self._has_next & self._is_undisturbed
        frame = closed if closed.any() else steady
        ops, lengths = self._ops, self._ops.end_us - self._ops.start_us
        counted = self._counts & frame[self._index]
        reduces, steps = (counted & np.array([text == look for text in ops.texts])[ops.what] for look in (REDUCE, OPTIMIZER))
        reduce_us = np.maximum(0, ops.end_us - np.maximum(ops.start_us, self._joined(reduces)))
        # Ops in vain ran before the step of the iteration before was final.
        in_vain = ops.in_vain & np.isin(ops.iteration - 1, self._numbers[frame])
        spans = (self._windows[frame, :, 1] - self._windows[frame, :, 0]).sum(axis=0)
        chosen = ((lengths, counted & (self._kind != "")), (reduce_us, reduces), (lengths, steps), (lengths, in_vain))
        parts = [self._by_worker(times_us, mask) for times_us, mask in chosen]
        return [
            TimeShares(row.worker, int(spans[row.worker.stage]), *(part.get(str(row.worker), 0) for part in parts))
            for row in self.plan.rows
        ]

    def _by_worker(self, times_us: Ints, chosen: Bools) -> dict[str, int]:
        sums = np.zeros(len(self._ops.workers), dtype=np.int64)
        np.add.at(sums, self._ops.worker[chosen], times_us[chosen])
        return dict(zip(self._ops.workers, sums.tolist(), strict=True))

    def _joined(self, is_reduce: Bools) -> Ints:
        """For each event, the time at which the last worker of its stage arrived at the reduction of its iteration."""
        ops, num = self._ops, len(self._numbers)
        arrived = np.full((num, len(ops.workers)), _NEVER)
        np.minimum.at(arrived, (self._index[is_reduce], ops.worker[is_reduce]), ops.start_us[is_reduce])
        last = np.zeros((num, self.plan.problem.shape.num_stages), dtype=np.int64)
        np.maximum.at(last, (np.arange(num)[:, None], ops.stages[None, :]), np.where(arrived < _NEVER, arrived, 0))
        return last[self._index, self._stage]

    @cached_property
    def taken_back(self) -> tuple[int, ...]:
        """The iterations whose step was taken back after ops of the next iteration had run."""
        return tuple((np.unique(self._ops.iteration[self._ops.in_vain]) - 1).tolist())

    @property
    def num_in_vain(self) -> int:
        return int(self._ops.in_vain.sum())

    @property
    def in_vain_us(self) -> int:
        return int((self._ops.end_us - self._ops.start_us)[self._ops.in_vain].sum())


def _refuse_other_plan(plan: Plan, ops: Ops) -> None:
    """Raise unless every op of the record is in the plan's row of its worker."""
    if len(ops) == 0:
        raise UserError("the record is empty: it holds no op that a worker ran, so there is nothing to report")
    rows = {str(row.worker): row for row in plan.rows}
    for name in ops.workers:
        if name not in rows:
            raise ForeignPlan(f"{name} ran ops in this record, but the plan has no row for it: give the plan of this run")
    foreign = np.flatnonzero(~_is_in(plan, ops))
    if foreign.size:
        name, text = min((ops.workers[ops.worker[index]], ops.texts[ops.what[index]]) for index in foreign.tolist())
        raise ForeignPlan(f"{name} ran {text} in this record, but the plan does not: give the plan of this run")


def _split_by_plan(plan: Plan, ops: Ops, known: Collection[int] | None) -> tuple[Ops, tuple[int, ...]]:
    """Return the ops of this plan's iterations, and the numbers of the iterations of other plans."""
    in_row = _is_in(plan, ops)
    others = np.unique(ops.iteration[~ops.in_vain & (~in_row if known is None else ~np.isin(ops.iteration, list(known)))])
    # An attempt in vain may have been by another plan.
    own = ops.chosen(~np.isin(ops.iteration, others) & (in_row | (~ops.in_vain & (known is not None))))
    if len(own) == 0:
        raise ForeignPlan(
            "no iteration of this record was executed by this plan: workers joined or left before the first one ended; "
            "give the plan of another epoch"
        )
    return own, tuple(others.tolist())


def _is_in(plan: Plan, ops: Ops) -> Bools:
    """Whether each op, reduction and step is in the row of its worker."""
    known: dict[tuple[str, str], int] = {}
    for row in plan.rows:
        texts = [REDUCE, OPTIMIZER, *(str(slot.op) for slot in plan.slots(row))]
        known |= dict.fromkeys(((str(row.worker), text) for text in texts), 1)
    return ops.look_up(known) > 0
