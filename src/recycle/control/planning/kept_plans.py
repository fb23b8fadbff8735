"""`KeptPlans`: plans that were made ahead, by their dead workers. Large ones are kept packed, in files without a name."""

import pickle
import tempfile
import zlib
from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import IO

from recycle.core.cluster import Worker
from recycle.core.plans.plan_source import PlanAssignment, places_for

Failed = frozenset[Worker]
# A plan of more ops is kept packed: it would take tens of megabytes of memory with its texts.
_MOST_OPS_UNPACKED = 50_000


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """A plan as compressed bytes: few, and quick to send and to keep."""

    content: bytes


def pack_if_large(assignment: PlanAssignment) -> PlanAssignment | PackedPlan:
    if assignment.plan.num_ops <= _MOST_OPS_UNPACKED:
        return assignment
    return PackedPlan(zlib.compress(pickle.dumps(assignment, pickle.HIGHEST_PROTOCOL), 1))


def unpack_plan(content: bytes) -> PlanAssignment:
    """Return the plan that this process, or its planning process, has packed."""
    assignment = pickle.loads(zlib.decompress(content))
    assert isinstance(assignment, PlanAssignment)
    return assignment


class KeptPlans:
    """Plans by the set of dead workers that they answer. Only one thread may use it at a time."""

    def __init__(self) -> None:
        self._plans: dict[Failed, PlanAssignment | IO[bytes]] = {}

    def __contains__(self, failed: Failed | None) -> bool:
        return failed in self._plans

    def __len__(self) -> int:
        return len(self._plans)

    def add(self, failed: Failed, plan: PlanAssignment | PackedPlan) -> None:
        self.remove(failed)
        if isinstance(plan, PlanAssignment):
            self._plans[failed] = plan
            return
        # It stays open until the plan is removed.
        file = tempfile.TemporaryFile("w+b")  # noqa: SIM115
        file.write(plan.content)
        self._plans[failed] = file

    def get(self, failed: Failed) -> PlanAssignment | bytes | None:
        """Return the plan for these dead workers, or the bytes of one that is packed; None if there is none."""
        kept = self._plans.get(failed)
        if kept is None or isinstance(kept, PlanAssignment):
            return kept
        kept.seek(0)
        return kept.read()

    def alike(self, failed: Failed) -> Failed | None:
        """Return the dead workers of a plan that has as many dead at every stage: peers can exchange their places for it."""
        wanted = num_dead_at(failed)
        return next((each for each in self._plans if len(each) == len(failed) and num_dead_at(each) == wanted), None)

    def remove(self, failed: Failed) -> None:
        kept = self._plans.pop(failed, None)
        if kept is not None and not isinstance(kept, PlanAssignment):
            kept.close()

    def remove_others(self, wanted: AbstractSet[Failed], most: int) -> None:
        """Remove the oldest plans above `most` that are not wanted."""
        unwanted = [failed for failed in self._plans if failed not in wanted]
        for failed in unwanted[: max(0, len(self._plans) - most)]:
            self.remove(failed)

    def clear(self) -> None:
        for failed in list(self._plans):
            self.remove(failed)


def num_dead_at(failed: Failed) -> Counter[int]:
    """The number of dead workers at each stage that has any."""
    return Counter(worker.stage for worker in failed)


def for_others(assignment: PlanAssignment, failed: Failed) -> PlanAssignment:
    """The same plan for other dead workers, as many at every stage: live workers take the places of their dead peers."""
    places = places_for(assignment.plan.problem.cluster, failed)
    return replace(assignment, places=places, reason=f"{assignment.reason}; peers have exchanged places")
