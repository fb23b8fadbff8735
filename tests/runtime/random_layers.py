"""A source of plans in which the stages have other layers after every failure, as chance makes them."""

from dataclasses import dataclass, replace
from random import Random

from recycle.core.cluster import Worker
from recycle.core.layer_sums import with_layer_counts
from recycle.core.plans.plan_source import PlanAssignment, RunLayers
from recycle.core.problem import Problem
from recycle.planner.live_planner import Planner


def random_counts(num_layers: int, num_stages: int, least: int, random: Random) -> tuple[int, ...]:
    """A distribution of layers over stages, with at least so many in each."""
    counts = [least] * num_stages
    for _ in range(num_layers - sum(counts)):
        counts[random.randrange(num_stages)] += 1
    return tuple(counts)


@dataclass(frozen=True)
class RandomLayers:
    """Plans for random layers of the stages, others for every set of dead workers. `seed` makes other ones.

    With `may_move`, workers move between stages, too, where the planner finds that it pays.
    """

    problem: Problem
    seed: int = 0
    may_move: bool = True

    def at_layers(self, layers: RunLayers) -> "RandomLayers":
        assert sum(layers.counts) == sum(self.problem.layer_counts)
        return self

    def answer(self, failed: frozenset[Worker]) -> PlanAssignment:
        names = " ".join(map(str, sorted(failed)))
        counts = self.counts(names)
        problem = replace(self.problem, profile=with_layer_counts(self.problem.profile, counts))
        return Planner(problem, may_move=self.may_move).answer(failed)

    def counts(self, names: str) -> tuple[int, ...]:
        if not names:
            return self.problem.layer_counts
        shape, least = self.problem.shape, max(1, self.problem.shared_layers)
        return random_counts(sum(self.problem.layer_counts), shape.num_stages, least, Random(f"{self.seed} {names}"))
