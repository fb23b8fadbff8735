"""Fusing of backward passes in a schedule, so that Decoupled BackProp is used only where it pays."""

from dataclasses import replace

import numpy as np

from recycle.core.op import Kind
from recycle.core.problem import Problem
from recycle.planner.heuristic import list_scheduling_kernel as kernel
from recycle.planner.heuristic.search import cost_table, work_table
from recycle.planner.model.assignment import Bools, Ints
from recycle.planner.model.schedule import Schedule, comms_of


def fuse(problem: Problem, schedule: Schedule) -> Schedule:
    """Return a schedule with the same period or a shorter one, in which a backward pass is split only where that helps."""
    if not problem.techniques.decoupled:
        return schedule
    candidate = replace(schedule, is_fused=schedule.is_fused | _may_fuse(problem, schedule))
    if (schedule.length_us(Kind.B) < schedule.length_us(Kind.I) + schedule.length_us(Kind.W)).any():
        candidate = retime(problem, candidate)
    return candidate if candidate.period_us(problem) <= schedule.period_us(problem) else schedule


def split_where_cheaper(problem: Problem, schedule: Schedule) -> Schedule:
    """Return the schedule with I and its W in place of every B that costs more than the two."""
    split_us, weight_us, fused_us = (schedule.length_us(kind) for kind in (Kind.I, Kind.W, Kind.B))
    is_dear = schedule.is_fused & (fused_us > split_us + weight_us)
    if not is_dear.any():
        return schedule
    weights = np.where(is_dear, schedule.input_us + split_us, schedule.weight_us)
    return retime(problem, replace(schedule, weight_us=weights, is_fused=schedule.is_fused & ~is_dear))


def _may_fuse(problem: Problem, schedule: Schedule) -> Bools:
    split_us, weight_us, fused_us = (schedule.length_us(kind) for kind in (Kind.I, Kind.W, Kind.B))
    follows = schedule.weight_us == schedule.input_us + split_us
    is_cheap = fused_us <= split_us + weight_us
    arrives = (schedule.input_us + split_us + weight_us)[1:] + comms_of(problem)[:, None]
    nobody_waits = np.ones_like(follows)
    nobody_waits[1:] = schedule.input_us[:-1] >= arrives
    result: Bools = follows & is_cheap & nobody_waits & ~schedule.is_fused
    return result


def retime(problem: Problem, schedule: Schedule) -> Schedule:
    """Keep the routes and the order of every row, and compute the times again."""
    starts = np.stack([schedule.forward_us, schedule.input_us, schedule.weight_us])
    order = _in_order(schedule, starts)
    work, costs = work_table(problem, schedule.assignment), cost_table(problem, schedule.assignment)
    kernel.justify(schedule.pipeline, work, costs, schedule.is_fused, problem.shape.num_pipelines, order, starts)
    return replace(schedule, forward_us=starts[kernel.F], input_us=starts[kernel.I], weight_us=starts[kernel.W])


def _in_order(schedule: Schedule, starts: Ints) -> Ints:
    """The ops as the kernel numbers them, by start; a fused backward pass has no W."""
    exists = np.stack([np.ones_like(schedule.is_fused), np.ones_like(schedule.is_fused), ~schedule.is_fused]).ravel()
    codes = np.flatnonzero(exists)
    in_order: Ints = codes[np.argsort(starts.ravel()[codes], kind="stable")]
    return in_order
