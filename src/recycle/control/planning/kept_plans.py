"""`KeptPlans`: plans that were made ahead, by dead workers and the speeds of the others. Large ones are kept packed."""

import pickle
import zlib
from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import NamedTuple

from recycle.core.cluster import Worker
from recycle.core.plans.plan_source import PlanAssignment, RunLayers, places_for
from recycle.core.plans.steady_period import Speeds

Failed = frozenset[Worker]
# A plan of more ops is kept packed: it would take tens of megabytes of memory with its texts, and takes a sixth of that packed.
_MOST_OPS_UNPACKED = 50_000


class PlanRequest(NamedTuple):
    """Who is dead, and the speeds of the others where they are known; without, the source's own.

    `layers` are those of the stages, if a plan may give them others.
    """

    failed: Failed
    speeds: Speeds | None = None
    layers: RunLayers | None = None


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


class KeptPlans(dict[PlanRequest, PlanAssignment | CompressedAssignment]):
    """Plans by the request that they answer."""

    def alike(self, request: PlanRequest) -> PlanRequest | None:
        """Return the request of a plan that has as many dead at every stage: peers can exchange their places for it.

        Peers of different speeds cannot.
        """
        failed, wanted = request.failed, num_dead_at(request.failed)
        if request.speeds:
            return None
        same = request._replace(failed=frozenset())
        alike = (each for each in self if each._replace(failed=frozenset()) == same and len(each.failed) == len(failed))
        return next((each for each in alike if num_dead_at(each.failed) == wanted), None)

    def remove_others(self, wanted: AbstractSet[PlanRequest], most: int) -> None:
        """Remove the oldest plans above `most` that are not wanted."""
        unwanted = [request for request in self if request not in wanted]
        for request in unwanted[: max(0, len(self) - most)]:
            del self[request]


def num_dead_at(failed: Failed) -> Counter[int]:
    """The number of dead workers at each stage that has any."""
    return Counter(worker.stage for worker in failed)


def for_others(assignment: PlanAssignment, failed: Failed) -> PlanAssignment:
    """The same plan for other dead workers, as many at every stage: live workers take the places of their dead peers."""
    places = places_for(assignment.plan.problem.cluster, failed)
    return replace(assignment, places=places, reason=f"{assignment.reason}; peers have exchanged places")
