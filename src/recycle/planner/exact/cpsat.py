"""The exact method for small and middle shapes: constraint programming with OR-Tools' CP-SAT.

The only module that imports ortools. It states the model of `exact_model`; each family of constraints is one method.
"""

from ortools.sat.python import cp_model

from recycle.core.op import Kind, MicroBatch, Op
from recycle.core.plans.plan import chain_of
from recycle.core.problem import Problem
from recycle.planner.exact import exact_model as exact
from recycle.planner.exact.exact_model import Exact, ExactLimit, Fusing
from recycle.planner.model.busiest_worker import BusiestWorker
from recycle.planner.model.schedule import Schedule

_EFFORT_OF_A_UNIT = 15_000_000  # placed ops of the greedy method that take about as long as a unit of CP-SAT's deterministic time


def solve_cpsat(problem: Problem, limit: ExactLimit, hint: Schedule, bound_us: int) -> Exact:
    """Search until the optimum is proven or the limit is reached. `hint` is a legal schedule, `bound_us` a proven bound."""
    if len(exact.ops_of(problem)) > exact.MOST_OPS_OF_MODEL:
        return Exact(None, bound_us)
    known_us = hint.period_us(problem)
    if known_us <= bound_us:
        return Exact(hint, bound_us)
    start = exact.canonical(problem, hint)
    # A hint outside the model may be shorter than every schedule of the model: then only a shorter one is searched for.
    upper_us = start.period_us(problem) if start is not None else known_us - 1
    model = _Model(problem, hint, bound_us, upper_us)
    if start is not None:
        model.add_start(start)
    if limit.left_s <= 0:
        return Exact(None, bound_us)
    solver = _solver(limit)
    # Presolve may choose one of several symmetric solutions, and not the hint: then the hint is lost.
    solver.parameters.keep_all_feasible_solutions_in_presolve = True
    status = solver.solve(model.cp)
    assert status != cp_model.MODEL_INVALID, model.cp.validate()
    used = round(solver.response_proto.deterministic_time * _EFFORT_OF_A_UNIT)
    if status == cp_model.INFEASIBLE:
        return Exact(hint, known_us, used)
    bound_us = max(bound_us, round(solver.best_objective_bound))
    return Exact(model.schedule(solver) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None, bound_us, used)


def prove_worker(worker: BusiestWorker, limit: ExactLimit, bound_us: int, upper_us: int) -> Exact:
    """Return a proven bound of the period from the rows that one worker can have; `upper_us` itself, if none is shorter.

    All micro-batches of the worker are alike, so that the j-th F, I and W are those of one micro-batch.
    """
    cp, num = cp_model.CpModel(), worker.num_microbatches
    period = cp.new_int_var(bound_us, upper_us - 1, "period")
    starts = [[cp.new_int_var(0, upper_us, f"{kind}{index}") for index in range(num)] for kind in "FIW"]
    ends = [[start + length for start in of_kind] for of_kind, length in zip(starts, worker.lengths_us, strict=True)]
    cp.add(starts[0][0] == 0)
    for index in range(num):
        cp.add(starts[1][index] >= starts[0][index] + worker.round_trip_us)
        cp.add(starts[2][index] >= ends[1][index])
    for of_kind, done in zip(starts, ends, strict=True):
        for earlier, later in zip(done[:-1], of_kind[1:], strict=True):
            cp.add(later >= earlier)
    cp.add_no_overlap(
        [
            cp.new_fixed_size_interval_var(start, length, "")
            for of_kind, length in zip(starts, worker.lengths_us, strict=True)
            for start in of_kind
            if length
        ]
    )
    for done, distance in ((ends[1], worker.num_before_input), (ends[2], worker.num_before_weight)):
        for earlier, later in zip(done, starts[0][distance:], strict=False):
            cp.add(later >= earlier)
    if worker.capacity is not None:
        held, demands = [], []
        for done, demand in ((ends[1], worker.taken - worker.kept), (ends[2], worker.kept)):
            for start, end in zip(starts[0], done, strict=True):
                if demand:
                    held.append(cp.new_interval_var(start, cp.new_int_var(0, upper_us, ""), end, ""))
                    demands.append(demand)
        cp.add_cumulative(held, demands, worker.capacity)
    cp.add(period >= ends[2][-1] + worker.after_end_us)
    cp.add(period >= ends[1][-1] + worker.after_input_us)
    cp.minimize(period)
    solver = _solver(limit)
    status = solver.solve(cp)
    assert status != cp_model.MODEL_INVALID, cp.validate()
    used = round(solver.response_proto.deterministic_time * _EFFORT_OF_A_UNIT)
    return Exact(None, upper_us if status == cp_model.INFEASIBLE else max(bound_us, round(solver.best_objective_bound)), used)


def _solver(limit: ExactLimit) -> cp_model.CpSolver:
    """A solver with one worker if its effort is counted: two exchange what they find when it happens to be found."""
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = 1
    if limit.effort is None:
        solver.parameters.num_workers = 2
        solver.parameters.max_time_in_seconds = limit.left_s
    else:
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = limit.effort / _EFFORT_OF_A_UNIT
    return solver


class _Model:
    """The CP-SAT model of a problem whose period is between a bound and an upper limit."""

    def __init__(self, problem: Problem, hint: Schedule, bound_us: int, upper_us: int) -> None:
        self.problem, self.assignment, self.given = problem, hint.assignment, exact.given_by(problem, hint)
        self.cp = cp_model.CpModel()
        # Staggered, a stage may start at any time of the first stage's window and then takes a period of its own.
        self.horizon_us = upper_us * (2 if problem.techniques.staggered else 1)
        self.ops = exact.ops_of(problem, self.given)
        self.period = self.cp.new_int_var(bound_us, upper_us, "period")
        self.start = {op: self.cp.new_int_var(0, self.horizon_us, f"start {op}") for op in self.ops}
        self.is_fused = {op: self._fused_literal(op) for op in self.ops if op.kind is Kind.I}
        self.end = {op: self._end(op) for op in self.ops}
        self.runs_on = {op: self._route_literals(op) for op in self.ops if op.kind is Kind.F}
        self.window = [self._window(stage) for stage in range(problem.shape.num_stages)]
        self.held: dict[tuple[Op, Op], cp_model.IntVar] = {}
        self.layer_window: dict[int, tuple[cp_model.IntVar, cp_model.IntVar]] = {}
        self._add_arcs()
        self._add_fused_weights()
        for stage in range(problem.shape.num_stages):
            self._add_workers(stage)
            self._add_window(stage)
            self._add_loads(stage)
        for layer, users in exact.layer_users(problem, self.given).items():
            self._add_layer_window(layer, users)
        self.cp.minimize(self.period)

    def _fused_literal(self, op: Op) -> cp_model.IntVar:
        how = exact.fusing(self.problem, op.stage, self.given)
        return self.cp.new_int_var(int(how is Fusing.ALWAYS), int(how is not Fusing.NEVER), f"fused {op}")

    def _route_literals(self, op: Op) -> dict[int, cp_model.IntVar]:
        """The pipelines that may run the chain at the stage of `op`, each with the literal that it does."""
        routes = exact.routes_of(self.problem, op, self.given)
        literals = {pipeline: self.cp.new_bool_var(f"{op} on {pipeline}") for pipeline in routes}
        self.cp.add_exactly_one(literals.values())
        return literals

    def _length(self, op: Op) -> cp_model.LinearExpr | int:
        split, fused = exact.lengths_us(self.problem, op, self.given)
        return split if split == fused else split + (fused - split) * self.is_fused[Op(op.stage, Kind.I, op.microbatch)]

    def _end(self, op: Op) -> cp_model.LinearExpr:
        length = self._length(op)
        if isinstance(length, int):
            return self.start[op] + length
        end = self.cp.new_int_var(0, self.horizon_us, f"end {op}")  # an interval takes no sum of two variables as its end
        self.cp.add(end == self.start[op] + length)
        return end

    def _add_arcs(self) -> None:
        for arc in exact.arcs(self.problem, self.given):
            before = self.start[arc.before] if arc.from_start else self.end[arc.before]
            self.cp.add(self.start[arc.after] >= before + arc.lag_us)

    def _add_fused_weights(self) -> None:
        """A W without length is at the end of its B, so that it never takes a worker's time elsewhere."""
        for op in self.ops:
            if op.kind is Kind.W and exact.fusing(self.problem, op.stage, self.given) is Fusing.FREE:
                fused = Op(op.stage, Kind.I, op.microbatch)
                self.cp.add(self.start[op] == self.end[fused]).only_enforce_if(self.is_fused[fused])

    def _forwards_on(self, stage: int, pipeline: int) -> list[Op]:
        """The forwards that may run on a worker; the rest of their chains' work at the stage is there too."""
        return [op for op, literals in self.runs_on.items() if op.stage == stage and pipeline in literals]

    def _add_workers(self, stage: int) -> None:
        for pipeline in self.problem.cluster.live_pipelines(stage):
            forwards = self._forwards_on(stage, pipeline)
            self._add_one_at_a_time(forwards, pipeline)
            self._add_memory(forwards, pipeline)

    def _add_one_at_a_time(self, forwards: list[Op], pipeline: int) -> None:
        intervals = []
        for forward in forwards:
            for kind in exact.kinds_of(self.problem, forward.stage, self.given):
                op = Op(forward.stage, kind, forward.microbatch)
                runs = self.runs_on[forward][pipeline]
                interval = self.cp.new_optional_interval_var(
                    self.start[op], self._length(op), self.end[op], runs, f"{op} on {pipeline}"
                )
                intervals.append(interval)
        self.cp.add_no_overlap(intervals)

    def _add_memory(self, forwards: list[Op], pipeline: int) -> None:
        """The memory held until I ends and the memory held until W ends are two demands on one capacity."""
        if not forwards:
            return
        problem, stage = self.problem, forwards[0].stage
        capacity, held = problem.capacity(stage), [exact.held_of(problem, forward, self.given) for forward in forwards]
        if capacity is None or capacity >= sum(whole for whole, _ in held):
            return
        last = exact.kinds_of(problem, stage, self.given)[-1]
        intervals, demands = [], []
        for forward, (whole, rest) in zip(forwards, held, strict=True):
            loads = {Kind.I: whole - rest, Kind.W: rest} if last is Kind.W else {Kind.I: whole}
            for kind, demand in loads.items():
                if demand:
                    intervals.append(self._held(forward, kind, pipeline))
                    demands.append(demand)
        self.cp.add_cumulative(intervals, demands, capacity)

    def _held(self, forward: Op, kind: Kind, pipeline: int) -> cp_model.IntervalVar:
        """The time from the start of a forward to the end of the op of `kind` of its chain."""
        name = f"{forward} held for {kind} on {pipeline}"
        last = Op(forward.stage, kind, forward.microbatch)
        if (forward, last) not in self.held:
            self.held[forward, last] = self.cp.new_int_var(0, self.horizon_us, name)
        length, literal = self.held[forward, last], self.runs_on[forward][pipeline]
        return self.cp.new_optional_interval_var(self.start[forward], length, self.end[last], literal, name)

    def _window(self, stage: int) -> tuple[cp_model.IntVar, cp_model.IntVar]:
        """A start and an end of all work at a stage. The very first op is a forward of stage 0: let it start at 0."""
        first = self.cp.new_int_var(
            exact.head_us(self.problem, stage, self.given), self.horizon_us if stage else 0, f"first {stage}"
        )
        return first, self.cp.new_int_var(0, self.horizon_us, f"last {stage}")

    def _add_window(self, stage: int) -> None:
        """The period covers every stage's own window (staggered), or everything from time 0 (synchronous)."""
        problem, (first, last) = self.problem, self.window[stage]
        for op in self.ops:
            if op.stage == stage and op.kind is Kind.F:
                self.cp.add(self.start[op] >= first)
            if op.stage == stage and op.kind is exact.kinds_of(problem, stage, self.given)[-1]:
                self.cp.add(self.end[op] <= last)
        work = last - first if problem.techniques.staggered else last
        self.cp.add(self.period >= work + exact.finish_us(problem, stage))

    def _add_loads(self, stage: int) -> None:
        """Implied, but linear, so that the solver's relaxation uses it: a window is as long as each worker's work."""
        first, last = self.window[stage]
        for pipeline in self.problem.cluster.live_pipelines(stage):
            loads = [
                exact.load_us(self.problem, forward, self.given) * self.runs_on[forward][pipeline]
                for forward in self._forwards_on(stage, pipeline)
            ]
            self.cp.add(last - first >= cp_model.LinearExpr.sum(loads))

    def _add_layer_window(self, layer: int, users: list[tuple[int, MicroBatch]]) -> None:
        """Staggered, a layer that several stages compute is used again when all of them have added their gradients."""
        held = self.problem.held_layers
        assert held is not None
        first, last = (self.cp.new_int_var(0, self.horizon_us, f"{which} use of layer {layer}") for which in ("first", "last"))
        for stage, chain in users:
            self.cp.add(self.start[Op(stage, Kind.F, chain)] >= first)
            self.cp.add(self.end[Op(stage, exact.kinds_of(self.problem, stage, self.given)[-1], chain)] <= last)
        self.cp.add(self.period >= last - first + held.finish_of_layer_us[layer])
        self.layer_window[layer] = first, last

    def add_start(self, start: Schedule) -> None:
        """Let the search begin at `start`, which is canonical. Every variable gets a value: CP-SAT may drop a partial hint."""
        at = {op: (op.stage, chain_of(self.problem.shape, op.microbatch)) for op in self.ops}
        start_us = {op: int(start.starts_us(op.kind)[at[op]]) for op in self.ops}
        end_us = {
            op: start_us[op] + exact.lengths_us(self.problem, op, self.given)[int(start.is_fused[at[op]])] for op in self.ops
        }
        for op in self.ops:
            self.cp.add_hint(self.start[op], start_us[op])
            if isinstance(end := self.end[op], cp_model.IntVar):
                self.cp.add_hint(end, end_us[op])
        for op, fused in self.is_fused.items():
            self.cp.add_hint(fused, bool(start.is_fused[at[op]]))
        for op, literals in self.runs_on.items():
            for pipeline, literal in literals.items():
                self.cp.add_hint(literal, bool(start.pipeline[at[op]] == pipeline))
        for (forward, last), length in self.held.items():
            self.cp.add_hint(length, end_us[last] - start_us[forward])
        layers = start.layer_windows(self.problem)
        windows = [*self.window, *(self.layer_window[layer] for layer in layers)]
        for variables, values in zip(windows, [*start.windows(), *layers.values()], strict=True):
            for variable, value in zip(variables, values, strict=True):
                self.cp.add_hint(variable, value)
        self.cp.add_hint(self.period, start.period_us(self.problem))

    def schedule(self, solver: cp_model.CpSolver) -> Schedule:
        schedule = Schedule.zeros(self.problem, self.assignment)
        for op, start in self.start.items():
            at = op.stage, chain_of(self.problem.shape, op.microbatch)
            schedule.starts_us(op.kind)[at] = solver.value(start)
            if op.kind is Kind.I:
                schedule.is_fused[at] = bool(solver.value(self.is_fused[op]))
            if op.kind is Kind.F:
                schedule.pipeline[at] = next(where for where, literal in self.runs_on[op].items() if solver.value(literal))
        return schedule
