"""MemoryUse: the memory that a worker needs by a plan: the state of its own layers and of its guests, and its activations."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from recycle.core.cluster import Worker
from recycle.core.plans.op_costs import OpCosts
from recycle.core.plans.plan import Plan, Row
from recycle.core.problem import Memory
from recycle.core.profile import Profile

_PLENTY_BYTES = 10**15


class MemoryUse(NamedTuple):
    """The bytes of a worker: of the state of its own layers, of the state of guests, and of activations at their peak.

    State is parameters, optimizer state and gradients. A guest is a layer that a stage holds for a neighbouring one.
    """

    own_bytes: int
    guest_bytes: int
    activation_bytes: int

    @property
    def static_bytes(self) -> int:
        return self.own_bytes + self.guest_bytes

    @property
    def total_bytes(self) -> int:
        return self.static_bytes + self.activation_bytes


def memory_use(plan: Plan, profile: Profile | None = None) -> Mapping[Worker, MemoryUse]:
    """The memory of every live worker; `profile` has the bytes of stages and layers, by default it is the plan's own."""
    costs = _costs_in_bytes(plan, profile)
    return {row.worker: _use_of(row, costs) for row in plan.rows}


def memory_use_of(worker: Worker, plan: Plan, profile: Profile | None = None) -> MemoryUse | None:
    """The memory of one worker; None if it is dead in the plan."""
    row = next((row for row in plan.rows if row.worker == worker), None)
    return _use_of(row, _costs_in_bytes(plan, profile)) if row is not None else None


def _costs_in_bytes(plan: Plan, profile: Profile | None) -> OpCosts:
    """The costs of the plan's ops with memory counted in bytes, whatever its limit is counted in."""
    memory = Memory.bytes([_PLENTY_BYTES] * plan.problem.shape.num_stages)
    return OpCosts(replace(plan.problem, profile=profile or plan.problem.profile, memory=memory), plan.cuts)


def _use_of(row: Row, costs: OpCosts) -> MemoryUse:
    problem, stage = costs.problem, row.worker.stage
    own_bytes = problem.profile.stages[stage].static_bytes
    deltas = costs.memory_deltas(row.worker, row.kinds, row.chains)
    return MemoryUse(own_bytes, problem.static_bytes(stage) - own_bytes, max(accumulate(deltas), default=0))
