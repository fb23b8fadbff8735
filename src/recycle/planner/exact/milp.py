"""The exact method of the paper: a mixed-integer program with order variables, solved by SciPy's HiGHS.

The only module that imports scipy. It proves far less than `cpsat`, but shares no solver with it, so it checks `cpsat` on small
shapes. It states the model of `exact_model`. HiGHS computes in floating point, so only its decisions (route, order, fused or
not) are used; `op_times` finds whole times for them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from itertools import combinations

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_array

from recycle.core.op import Kind, Op
from recycle.core.problem import Problem
from recycle.planner.exact import exact_model as exact
from recycle.planner.exact.exact_model import Exact, ExactLimit, Fusing
from recycle.planner.exact.op_times import OpTimes, limits_of, whole_times
from recycle.planner.model.assignment import Bools, Ints
from recycle.planner.model.schedule import Schedule

MAX_ORDER_BITS = 2_000
"""Pairs of ops whose order is open. HiGHS proves little beyond some hundred; beyond this it is not run."""
MAX_OPS = 400
"""Order bits are counted over pairs of ops: beyond this the counting alone takes too long."""

_EFFORT_OF_A_NODE = 30_000  # placed ops of the greedy method that take about as long as a node of the search tree
_INFEASIBLE = 2  # a status of scipy.optimize.milp


def solve_milp(problem: Problem, limit: ExactLimit, hint: Schedule, bound_us: int) -> Exact:
    """Search until the optimum is proven or the limit is reached. `hint` is a legal schedule, `bound_us` a proven bound.

    The program asks for less than the hint's period; if there is no such schedule, the hint is the answer.
    """
    if len(exact.ops_of(problem)) > MAX_OPS:
        return Exact(None, bound_us)
    known_us = hint.period_us(problem)
    if known_us <= bound_us:
        return Exact(hint, bound_us)
    timing = OpTimes(problem, exact.given_by(problem, hint))
    limits = limits_of(timing, known_us - 1)
    if limits is None:
        return Exact(hint, known_us)
    program = _Program(timing, hint, *limits)
    if program.num_order_bits > MAX_ORDER_BITS:
        return Exact(None, bound_us)
    result = program.run(bound_us, known_us - 1, limit)
    if result is None:
        return Exact(None, bound_us)
    used = (result.mip_node_count or 0) * _EFFORT_OF_A_NODE
    if result.status == _INFEASIBLE:
        return Exact(hint, known_us, used)
    if result.mip_dual_bound is not None and math.isfinite(result.mip_dual_bound):
        bound_us = max(bound_us, math.ceil(result.mip_dual_bound - 1e-4))
    return Exact(program.schedule(result.x) if result.x is not None else None, bound_us, used)


@dataclass(slots=True)
class _Linear:
    """A linear expression: a constant and the factors of the variables."""

    constant: float = 0.0
    factors: dict[int, float] = field(default_factory=dict)

    def plus(self, other: "_Linear", factor: float = 1.0) -> "_Linear":
        factors = dict(self.factors)
        for variable, value in other.factors.items():
            factors[variable] = factors.get(variable, 0.0) + factor * value
        return _Linear(self.constant + factor * other.constant, factors)


_ONE = _Linear(1.0)


class _Program:
    """The variables and rows of the mixed-integer program."""

    def __init__(self, timing: OpTimes, hint: Schedule, earliest: Ints, latest: Ints) -> None:
        self.timing, self.problem, self.ops = timing, timing.problem, timing.ops
        self.assignment, self.given = hint.assignment, timing.given
        self.earliest, self.latest = earliest, latest
        self.lows: list[float] = []
        self.highs: list[float] = []
        self.is_whole: list[bool] = []
        self.rows: list[_Linear] = []  # each is at least 0
        self.period = self._variable(0, math.inf, whole=True)
        self.start = [self._variable(low, high) for low, high in zip(earliest.tolist(), latest.tolist(), strict=True)]
        self.fused = {op: self._fused_bit(op) for op in self.ops if op.kind is Kind.I}
        self.routes = {op: self._route_bits(op) for op in self.ops if op.kind is Kind.F}
        self.length = [self._length(op) for op in self.ops]
        self.orders: dict[tuple[int, int], _Linear] = {}
        self.num_order_bits = 0
        self._make_orders()

    def _variable(self, low: float, high: float, whole: bool = False) -> _Linear:
        self.lows.append(low)
        self.highs.append(high)
        self.is_whole.append(whole)
        return _Linear(0.0, {len(self.lows) - 1: 1.0})

    def _fused_bit(self, op: Op) -> _Linear:
        how = exact.fusing(self.problem, op.stage, self.given)
        return self._variable(0, 1, whole=True) if how is Fusing.FREE else _Linear(float(how is Fusing.ALWAYS))

    def _route_bits(self, op: Op) -> dict[int, _Linear]:
        """The pipelines that may run the chain at the stage of `op`, each with the bit that it does."""
        routes = exact.routes_of(self.problem, op, self.given)
        if len(routes) == 1:
            return {routes[0]: _ONE}
        return {pipeline: self._variable(0, 1, whole=True) for pipeline in routes}

    def _length(self, op: Op) -> _Linear:
        split, fused = exact.lengths_us(self.problem, op, self.given)
        return _Linear(split).plus(self.fused[Op(op.stage, Kind.I, op.microbatch)], fused - split)

    def _make_orders(self) -> None:
        """For two ops that may meet on a worker: does the first run before the second? A bit, or a known 0 or 1."""
        follows = self._known_orders()
        for one, other in combinations(range(len(self.ops)), 2):
            if self.ops[one].stage == self.ops[other].stage and self._meetings(one, other):
                self._make_order(one, other, follows)

    def _make_order(self, one: int, other: int, follows: Bools) -> None:
        if follows[one, other] or follows[other, one]:
            bit = _Linear(float(follows[one, other]))
        elif self.num_order_bits > MAX_ORDER_BITS:
            return
        else:
            self.num_order_bits += 1
            bit = self._variable(0, 1, whole=True)
        self.orders[one, other] = bit
        self.orders[other, one] = _ONE.plus(bit, -1.0)

    def _known_orders(self) -> Bools:
        """[i, j]: on one worker, i can only run before j. By arcs, through others too, or because j cannot be first."""
        shortest = self.timing.shortest
        follows = np.zeros((len(self.ops), len(self.ops)), dtype=np.bool_)
        for before, after, _ in self.timing.edges(shortest).tolist():
            follows[before, after] = True
        while True:
            # An op that comes first along arcs starts no later than the other; on one worker that decides the order.
            longer = follows | (follows.astype(np.float32) @ follows.astype(np.float32) > 0)
            if (longer == follows).all():
                break
            follows = longer
        return follows | ((self.earliest + shortest)[None, :] > self.latest[:, None])

    def _forward(self, at: int) -> Op:
        return Op(self.ops[at].stage, Kind.F, self.ops[at].microbatch)

    def _meetings(self, one: int, other: int) -> list[_Linear]:
        """For each worker on which two ops may meet: 0 if they do, and 1 or 2 if they do not."""
        if self._forward(one) == self._forward(other):
            return [_Linear()]
        ours, theirs = self.routes[self._forward(one)], self.routes[self._forward(other)]
        return [_Linear(2.0).plus(bit, -1.0).plus(theirs[where], -1.0) for where, bit in ours.items() if where in theirs]

    def run(self, bound_us: int, upper_us: int, limit: ExactLimit) -> OptimizeResult | None:
        """Build the rest and let HiGHS search; None if no time was left for it."""
        self.lows[0], self.highs[0] = bound_us, upper_us
        self._add_routes()
        self._add_arcs()
        self._add_one_at_a_time()
        for stage in range(self.problem.shape.num_stages):
            self._add_memory(stage)
            self._add_window(stage)
            self._add_loads(stage)
        self._add_layer_windows()
        if limit.left_s <= 0:
            return None
        counted = {"node_limit": max(1, limit.effort // _EFFORT_OF_A_NODE)} if limit.effort is not None else {}
        timed = {"time_limit": limit.left_s} if limit.effort is None else {}
        objective = np.zeros(len(self.lows))
        objective[0] = 1.0
        result: OptimizeResult = milp(
            objective,
            integrality=np.array(self.is_whole, dtype=np.int64),
            bounds=Bounds(np.array(self.lows), np.array(self.highs)),
            constraints=self._matrix(),
            options={"mip_rel_gap": 0.0} | counted | timed,
        )
        return result

    def _matrix(self) -> LinearConstraint:
        entries = [
            (row, variable, factor) for row, line in enumerate(self.rows) for variable, factor in line.factors.items() if factor
        ]
        at_rows, at_columns, factors = zip(*entries, strict=True)
        matrix = csr_array((factors, (at_rows, at_columns)), shape=(len(self.rows), len(self.lows)))
        return LinearConstraint(matrix, lb=np.array([-line.constant for line in self.rows]))

    def _add(self, left: _Linear, right: _Linear) -> None:
        """Demand left >= right."""
        row = left.plus(right, -1.0)
        if any(row.factors.values()):
            self.rows.append(row)

    def _add_routes(self) -> None:
        for bits in self.routes.values():
            if len(bits) > 1:
                total = _total(bits.values())
                self._add(total, _ONE)
                self._add(_ONE, total)

    def _add_arcs(self) -> None:
        for arc in self.timing.arcs:
            before, after = self.timing.number[arc.before], self.timing.number[arc.after]
            ready = self.start[before] if arc.from_start else self.start[before].plus(self.length[before])
            self._add(self.start[after], ready.plus(_Linear(arc.lag_us)))

    def _add_one_at_a_time(self) -> None:
        """If `one` runs before `other` on the same worker, it ends first; if not, a large constant makes the row hold."""
        for (one, other), bit in self.orders.items():
            if bit == _Linear():
                continue  # never in this order
            big = float(self.latest[one] + max(exact.lengths_us(self.problem, self.ops[one], self.given)) - self.earliest[other])
            if big <= 0:
                continue
            end = self.start[one].plus(self.length[one])
            for meeting in self._meetings(one, other):
                slack = _ONE.plus(bit, -1.0).plus(meeting)
                self._add(self.start[other], end.plus(slack, -big))

    def _add_memory(self, stage: int) -> None:
        """A worker holds most when an F starts: the chains whose F is before it and whose I or W is not."""
        problem, forwards = self.problem, self.timing.of_kind(stage, last=False)
        capacity, held = problem.capacity(stage), {at: exact.held_of(problem, self.ops[at], self.given) for at in forwards}
        if capacity is None or capacity >= sum(whole for whole, _ in held.values()):
            return
        last = exact.kinds_of(problem, stage, self.given)[-1]
        for at in forwards:
            total = _Linear(held[at][0])
            for other in forwards:
                whole, rest = held[other]
                if other != at and self._meetings(at, other):
                    total = total.plus(self._held(other, Kind.I, at), whole - rest).plus(self._held(other, last, at), rest)
            self._add(_Linear(capacity), total)

    def _held(self, other: int, until: Kind, at: int) -> _Linear:
        """At least 1 if the chain of the forward `other` is on the worker of `at`, begun but not done with `until`."""
        done = self.timing.number[Op(self.ops[other].stage, until, self.ops[other].microbatch)]
        begun = self.orders[other, at].plus(self.orders[done, at], -1.0)
        meetings = self._meetings(other, at)
        if not meetings[0].factors:
            return begun
        held = self._variable(0, 1)
        for meeting in meetings:
            self._add(held, begun.plus(meeting, -1.0))
        return held

    def _add_window(self, stage: int) -> None:
        """The period covers every stage's own window (staggered), or everything from time 0 (synchronous)."""
        opens = _Linear()
        if self.problem.techniques.staggered and stage:
            opens = self._variable(0, math.inf)
            for at in self.timing.of_kind(stage, last=False):
                self._add(self.start[at], opens)
        for at in self.timing.of_kind(stage, last=True):
            end = self.start[at].plus(self.length[at])
            self._add(self.period.plus(opens), end.plus(_Linear(exact.finish_us(self.problem, stage))))

    def _add_loads(self, stage: int) -> None:
        """Implied, but stronger for the relaxation: a window is as long as each worker's work."""
        head = 0 if self.problem.techniques.staggered else exact.head_us(self.problem, stage, self.given)
        fixed = _Linear(head + exact.finish_us(self.problem, stage))
        forwards = [op for op in self.routes if op.stage == stage]
        for pipeline in self.problem.cluster.live_pipelines(stage):
            on_it = [op for op in forwards if pipeline in self.routes[op]]
            loads = [_Linear().plus(self.routes[op][pipeline], exact.load_us(self.problem, op, self.given)) for op in on_it]
            self._add(self.period, fixed.plus(_total(loads)))

    def _add_layer_windows(self) -> None:
        """Staggered, a layer that several stages compute is used again when all of them have added their gradients."""
        held = self.problem.held_layers
        for layer, users in self.timing.uses_of_layers().items():
            assert held is not None
            opens, finish = self._variable(0, math.inf), _Linear(held.finish_of_layer_us[layer])
            for first, last in users:
                self._add(self.start[first], opens)
                self._add(self.period.plus(opens), self.start[last].plus(self.length[last]).plus(finish))

    def schedule(self, values: npt.NDArray[np.float64]) -> Schedule | None:
        """The schedule of HiGHS's decisions, in whole times; None if its tolerance hid that there are none."""

        def value(line: _Linear) -> float:
            return line.constant + sum(factor * float(values[variable]) for variable, factor in line.factors.items())

        schedule, at = Schedule.zeros(self.problem, self.assignment), self.timing.indices
        for op, bits in self.routes.items():
            schedule.pipeline[at[op]] = max(bits, key=lambda where: value(bits[where]))
        for op, bit in self.fused.items():
            schedule.is_fused[at[op]] = value(bit) > 0.5
        rough = [value(start) for start in self.start]
        least_us = math.floor(value(self.period) + 1e-4)
        starts = whole_times(self.timing, schedule, rough, range(least_us, least_us + 3))
        if starts is None:
            return None
        for op, start in zip(self.ops, starts.tolist(), strict=True):
            schedule.starts_us(op.kind)[at[op]] = start
        return schedule


def _total(lines: Iterable[_Linear]) -> _Linear:
    return reduce(_Linear.plus, lines, _Linear())
