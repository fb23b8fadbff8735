"""`search`: the best choice of every system, with and without spares, found best first.

Every choice begins with an upper bound that needs no plan. In each round the most promising choices of each group (a system, with or
without spares) are looked at more closely: first their own fault-free step and some plans, then a simulation of a few seeds. A group
ends when no bound that is left exceeds its best simulated throughput by more than `MARGIN`; so what was not simulated is worse, or
better by less than that. Then the best of every group, and all choices within `FINAL_MARGIN` of the best of all, are simulated over
all seeds. If a group reaches its limits before that, `proven` is false and `left` says how much better a choice could be.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from recycle.sim.advise.choices import SystemChoice, all_choices
from recycle.sim.advise.evaluations import Evaluations, SimulatedRuns
from recycle.sim.advise.question import ClusterQuestion
from recycle.sim.advise.upper_bounds import Refined, first_bound

MARGIN, FINAL_MARGIN = 0.002, 0.005
MOST_SIMULATED, MOST_REFINED, MOST_FINALISTS = 20, 120, 12
_PER_ROUND = 4
NUM_ALTERNATIVES = 3


@dataclass(frozen=True, slots=True)
class FoundChoice:
    """A choice that was simulated over all seeds."""

    choice: SystemChoice
    runs: SimulatedRuns
    fault_free: float


@dataclass(slots=True)
class _Group:
    """The choices of one system, with or without spares: bounds that are open, and what was simulated."""

    open: dict[SystemChoice, float]
    refined: dict[SystemChoice, Refined] = field(default_factory=dict)
    simulated: dict[SystemChoice, float] = field(default_factory=dict)
    problem: str = ""

    @property
    def best(self) -> float:
        return max(self.simulated.values(), default=0.0)

    @property
    def most_left(self) -> float:
        return max(self.open.values(), default=0.0)

    @property
    def is_proven(self) -> bool:
        return self.most_left <= self.best * (1 + MARGIN)

    @property
    def is_done(self) -> bool:
        return self.is_proven or len(self.simulated) >= MOST_SIMULATED or len(self.refined) >= MOST_REFINED

    def next_ones(self) -> list[SystemChoice]:
        """The open choices with the highest bounds, as far as they may still be the best."""
        ranked = sorted(self.open, key=lambda choice: (-self.open[choice], choice.key))[:_PER_ROUND]
        return [choice for choice in ranked if self.open[choice] > self.best * (1 + MARGIN)]


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The best choice of a group, if any runs; whether it is proven best, else the bound over its throughput; or the problem."""

    best: FoundChoice | None
    is_proven: bool
    left: float
    problem: str


@dataclass(frozen=True, slots=True)
class SearchResult:
    """All choices that were simulated over all seeds, best first, the groups, and how many choices there were."""

    ranked: Sequence[FoundChoice]
    groups: Mapping[tuple[str, bool], GroupResult]
    num_choices: int
    num_refined: int
    num_screened: int


def value_of(question: ClusterQuestion, choice: SystemChoice, samples_per_s: float) -> float:
    """What is to be as high as possible: samples a second or, with prices, samples for the price of a GPU second."""
    if question.prices is None:
        return samples_per_s
    return samples_per_s / cost_per_s(question, choice)


def cost_per_s(question: ClusterQuestion, choice: SystemChoice) -> float:
    """The price of a second of all GPUs, those of spare servers at their own price."""
    assert question.prices is not None
    spare = choice.num_spare_servers * question.gpus_per_server
    prices = question.prices
    return ((question.num_gpus - spare) * prices.gpu_hour + spare * prices.spare_hour) / 3600


def search(question: ClusterQuestion, known: Evaluations) -> SearchResult:
    """Return the best choices of `question`. The same question gives the same answer on every machine."""
    screen = question.screening()
    choices = list(all_choices(screen))
    groups = _bounded_groups(screen, choices, known)
    while open_groups := [group for group in groups.values() if not group.is_done]:
        wanted = [choice for group in open_groups for choice in group.next_ones()]
        _look_closer(screen, groups, wanted, known)
    finalists = _finalists(groups)
    doing = f"simulating the best {len(finalists)} over {question.num_seeds} seeds"
    runs = known.simulate([(question, choice) for choice in finalists], doing)
    rates = [groups[choice.group].refined[choice].fault_free for choice in finalists]
    found = [FoundChoice(*each) for each in zip(finalists, runs, rates, strict=True)]
    found.sort(key=lambda one: (-value_of(question, one.choice, one.runs.mean), one.choice.key))
    results = {name: _result(group, [one for one in found if one.choice.group == name]) for name, group in groups.items()}
    num_refined, num_screened = (sum(map(len, each)) for each in _counted(groups))
    return SearchResult(found, results, len(choices), num_refined, num_screened)


def _counted(
    groups: Mapping[tuple[str, bool], _Group],
) -> tuple[list[dict[SystemChoice, Refined]], list[dict[SystemChoice, float]]]:
    return [group.refined for group in groups.values()], [group.simulated for group in groups.values()]


def _bounded_groups(
    screen: ClusterQuestion, choices: Sequence[SystemChoice], known: Evaluations
) -> dict[tuple[str, bool], _Group]:
    groups = {}
    for name, members in groupby(sorted(choices, key=lambda choice: (choice.group, choice.key)), lambda choice: choice.group):
        known.report(f"bounding {len(choices)} choices")
        groups[name] = _Group({choice: value_of(screen, choice, first_bound(screen, choice)) for choice in members})
    return groups


def _look_closer(
    screen: ClusterQuestion, groups: Mapping[tuple[str, bool], _Group], wanted: Sequence[SystemChoice], known: Evaluations
) -> None:
    """Refine the choices that have their first bound, and simulate those that are refined."""
    fresh = [choice for choice in wanted if choice not in groups[choice.group].refined]
    ready = [choice for choice in wanted if choice in groups[choice.group].refined]
    for choice, refined in zip(fresh, known.refine(screen, fresh, "asking systems for their steps"), strict=True):
        group = groups[choice.group]
        group.refined[choice] = refined
        most = min(group.open[choice], value_of(screen, choice, refined.most))
        group.open[choice] = most
        if not refined.fault_free:
            del group.open[choice]
            group.problem = group.problem or refined.problem
    cases = [(screen, choice) for choice in ready]
    for choice, runs in zip(ready, known.simulate(cases, "simulating promising shapes"), strict=True):
        group = groups[choice.group]
        del group.open[choice]
        group.simulated[choice] = value_of(screen, choice, runs.mean)


def _finalists(groups: Mapping[tuple[str, bool], _Group]) -> list[SystemChoice]:
    """The best of every group, and the best of all within `FINAL_MARGIN`; at least as many as there are alternatives."""
    values = {choice: value for group in groups.values() for choice, value in group.simulated.items() if value > 0}
    ranked = sorted(values, key=lambda choice: (-values[choice], choice.key))
    best = values[ranked[0]] if ranked else 0.0
    close = [choice for choice in ranked if values[choice] >= best * (1 - FINAL_MARGIN)][:MOST_FINALISTS]
    chosen = dict.fromkeys([*ranked[: NUM_ALTERNATIVES + 1], *close])
    for group in groups.values():
        own = {choice: value for choice, value in group.simulated.items() if value > 0}
        if own:
            chosen[max(sorted(own, key=lambda choice: choice.key), key=lambda choice: own[choice])] = None
    return list(chosen)


def _result(group: _Group, found: Sequence[FoundChoice]) -> GroupResult:
    left = group.most_left / group.best - 1 if group.best else 0.0
    problem = "" if found else group.problem or ("it makes no progress" if group.simulated else "no shape fits")
    return GroupResult(found[0] if found else None, group.is_proven, max(0.0, left), problem)
