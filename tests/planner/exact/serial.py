"""A legal schedule of any problem: the worst hint that an exact method can get."""

from recycle.core.op import Kind, Op
from recycle.core.plans.plan import microbatch_of
from recycle.core.plans.rules import lag_us, needs
from recycle.core.problem import Problem
from recycle.planner.exact.exact_model import Fusing, fusing, given_by, kinds_of, lengths_us, routes_of
from recycle.planner.model.chain_cuts import assign
from recycle.planner.model.schedule import Schedule


def serial(problem: Problem) -> Schedule:
    """The schedule that runs one op at a time, chain after chain: legal with any memory, so a first upper bound."""
    shape = problem.shape
    schedule = Schedule.zeros(problem, assign(problem))
    given = given_by(problem, schedule)
    for stage in range(shape.num_stages):
        schedule.is_fused[stage] = fusing(problem, stage, given) is Fusing.ALWAYS
    now, stages = 0, range(shape.num_stages)
    for chain in range(shape.num_chains):
        microbatch = microbatch_of(shape, chain)
        ops = [Op(s, Kind.F, microbatch) for s in stages]
        ops += [Op(s, kind, microbatch) for s in reversed(stages) for kind in kinds_of(problem, s, given)[1:]]
        for op in ops:
            now += max((lag_us(before, op, problem) for before in needs(op, shape.num_stages)), default=0)
            schedule.starts_us(op.kind)[op.stage, chain] = now
            schedule.pipeline[op.stage, chain] = routes_of(problem, op, given)[0]
            now += lengths_us(problem, op, given)[0]
    return schedule
