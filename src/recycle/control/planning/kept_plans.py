"""`KeptPlans`: plans that were made ahead, by their dead workers. Large ones are kept packed."""

import pickle
import zlib
from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from recycle.core.cluster import Worker
from recycle.core.plans.plan_source import PlanAssignment, places_for

Failed = frozenset[Worker]
# A plan of more ops is kept packed: it would take tens of megabytes of memory with its texts, and takes a sixth of that packed.
_MOST_OPS_UNPACKED = 50_000


@dataclass(frozen=True, slots=True)
class CompressedAssignment:
    """A plan with its places and texts as compressed bytes: few, and quick to send and to keep."""

    content: bytes

    def unpack(self) -> PlanAssignment:
        """Return the plan, which this process or its planning process has packed."""
        assignment = pickle.loads(zlib.decompress(self.content))
        assert isinstance(assignment, PlanAssignment)
        return assignment


def pack_if_large(assignment: PlanAssignment) -> PlanAssignment | CompressedAssignment:
    if assignment.plan.num_ops <= _MOST_OPS_UNPACKED:
        return assignment
    return CompressedAssignment(zlib.compress(pickle.dumps(assignment, pickle.HIGHEST_PROTOCOL), 1))


class KeptPlans(dict[Failed, PlanAssignment | CompressedAssignment]):
    """Plans by the set of dead workers that they answer."""

    def alike(self, failed: Failed) -> Failed | None:
        """Return the dead workers of a plan that has as many dead at every stage: peers can exchange their places for it."""
        wanted = num_dead_at(failed)
        return next((each for each in self if len(each) == len(failed) and num_dead_at(each) == wanted), None)

    def remove_others(self, wanted: AbstractSet[Failed], most: int) -> None:
        """Remove the oldest plans above `most` that are not wanted."""
        unwanted = [failed for failed in self if failed not in wanted]
        for failed in unwanted[: max(0, len(self) - most)]:
            del self[failed]


def num_dead_at(failed: Failed) -> Counter[int]:
    """The number of dead workers at each stage that has any."""
    return Counter(worker.stage for worker in failed)


def for_others(assignment: PlanAssignment, failed: Failed) -> PlanAssignment:
    """The same plan for other dead workers, as many at every stage: live workers take the places of their dead peers."""
    places = places_for(assignment.plan.problem.cluster, failed)
    return replace(assignment, places=places, reason=f"{assignment.reason}; peers have exchanged places")
