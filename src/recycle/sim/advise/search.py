"""`search`: the best choice of every system, with and without spares, found best first.

Every choice begins with an upper bound that needs no plan. In each round the most promising choices of each group (a system, with
or without spares) are looked at more closely: first a closer bound, then their own fault-free step, then a simulation of a few
seeds. A group ends when no bound that is left exceeds its best simulated throughput by more than `MARGIN`; so what was not
simulated is worse, or better by less than that. The same holds for the best `NUM_ALTERNATIVES` + 1 of all. Then the best of
every group, and all choices within `FINAL_MARGIN` of the best of all, are simulated over all seeds. If a group reaches its limits
before that, `is_proven` is false, and `left` says how much better than its best a choice could be.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from recycle.sim.advise.choices import BOUND_TO_SHAPE, SystemChoice, all_choices, is_planned
from recycle.sim.advise.evaluations import Evaluations, SimulatedRuns
from recycle.sim.advise.question import ClusterQuestion
from recycle.sim.advise.upper_bounds import Refined, expected_rate, first_bound

MARGIN, FINAL_MARGIN = 0.002, 0.005
MOST_FINALISTS = 8
# How many choices of a group are looked at in a round: a plan takes seconds, the step of another system milliseconds.
# Few are simulated in a round, because each result may show that the next simulation is not needed.
_PER_ROUND_OF_PLANS, _SIMULATED_PER_ROUND = 4, 2
NUM_ALTERNATIVES = 3

_GroupName = tuple[str, bool]


@dataclass(frozen=True, slots=True)
class FoundChoice:
    """A choice that was simulated over all seeds."""

    choice: SystemChoice
    runs: SimulatedRuns
    fault_free: float


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """How many choices of a group are simulated and asked at most, and with how many rivals the first choice is compared.

    A simulation and a step take time in proportion to the workers, so that there are fewer of them in a large cluster; fewest in
    a group that has no choice among the best of all.
    """

    most_simulated: int
    most_behind: int
    most_asked: int
    most_rivals: int = 5

    @staticmethod
    def of(num_gpus: int) -> "SearchLimits":
        most_simulated, most_asked = max(4, min(16, 65_536 // num_gpus)), max(24, min(400, 524_288 // num_gpus))
        if num_gpus <= 4096:
            return SearchLimits(most_simulated, most_simulated, most_asked)
        return SearchLimits(most_simulated, most_simulated // 2, most_asked, most_rivals=4)

    @property
    def most_in_vain(self) -> int:
        """How many are asked at most if hardly any of them runs."""
        return min(400, max(128, 4 * self.most_asked))

    @property
    def per_round(self) -> int:
        return min(32, self.most_asked // 4)


class _Stage(Enum):
    """How closely a choice was looked at."""

    BOUNDED = 0
    PROVEN = 1
    ASKED = 2


@dataclass(slots=True)
class _OpenChoice:
    """The upper bound of a choice that may still be the best, and what it is expected to reach."""

    most: float
    expected: float
    stage: _Stage


@dataclass(slots=True)
class _Group:
    """The choices of one system, with or without spares: those that are open, and what was simulated."""

    limits: SearchLimits
    open: dict[SystemChoice, _OpenChoice] = field(default_factory=dict)
    fault_free: dict[SystemChoice, float] = field(default_factory=dict)
    simulated: dict[SystemChoice, float] = field(default_factory=dict)
    problem: str = ""

    @property
    def best(self) -> float:
        return max(self.simulated.values(), default=0.0)

    @property
    def most_left(self) -> float:
        return max((one.most for one in self.open.values()), default=0.0)

    def is_done(self, wanted: float) -> bool:
        """Whether no open choice can be the best of the group, or exceed `wanted`, or a limit is reached."""
        limits = self.limits
        most_simulated = limits.most_simulated if self.most_left > wanted else limits.most_behind
        return len(self.simulated) >= most_simulated or not self.next_ones(wanted)

    def next_ones(self, wanted: float) -> list[SystemChoice]:
        """The most promising open choices; of equal promise those that have been looked at most closely.

        When enough have been asked, only these are simulated. Before anything is simulated, the best that was asked is, too: its
        result shows which bounds are too low.
        """
        least = min(self.best, wanted) * (1 + MARGIN)
        num_running = sum(rate > 0 for rate in self.fault_free.values())
        has_asked_all = num_running >= self.limits.most_asked or len(self.fault_free) >= self.limits.most_in_vain
        may_win = [
            choice for choice, one in self.open.items() if one.most > least and (one.stage is _Stage.ASKED or not has_asked_all)
        ]
        ranked = sorted(may_win, key=lambda choice: (-self.open[choice].expected, -self.open[choice].stage.value, choice.key))
        looked_at = ranked[: _PER_ROUND_OF_PLANS if ranked and is_planned(ranked[0].system) else self.limits.per_round]
        if not self.simulated:
            looked_at += [choice for choice in ranked if choice not in looked_at and self.open[choice].stage is _Stage.ASKED][:1]
        asked = [choice for choice in looked_at if self.open[choice].stage is _Stage.ASKED]
        return [choice for choice in looked_at if choice not in asked[_SIMULATED_PER_ROUND:]]


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
    groups: Mapping[_GroupName, GroupResult]
    num_choices: int
    num_asked: int
    num_screened: int


def search(question: ClusterQuestion, known: Evaluations) -> SearchResult:
    """Return the best choices of `question`. The same question gives the same answer on every machine."""
    screen = question.screening()
    choices = list(all_choices(screen))
    groups = _bounded_groups(screen, choices, known)
    while wanted := [choice for group in groups.values() for choice in _wanted(group, _worst_shown(groups))]:
        _look_closer(screen, groups, wanted, known)
    finalists = _finalists(groups)
    doing = f"simulating the best {len(finalists)} over {question.num_seeds} seeds"
    runs = known.simulate([(question, choice) for choice in finalists], doing)
    rates = [groups[choice.group].fault_free[choice] for choice in finalists]
    found = [FoundChoice(*each) for each in zip(finalists, runs, rates, strict=True)]
    found.sort(key=lambda one: (-one.runs.mean, one.choice.key))
    results = {name: _result(group, [one for one in found if one.choice.group == name]) for name, group in groups.items()}
    num_asked, num_screened = (
        sum(len(getattr(group, what)) for group in groups.values()) for what in ("fault_free", "simulated")
    )
    return SearchResult(found, results, len(choices), num_asked, num_screened)


def _wanted(group: _Group, worst_shown: float) -> list[SystemChoice]:
    return [] if group.is_done(worst_shown) else group.next_ones(worst_shown)


def _worst_shown(groups: Mapping[_GroupName, _Group]) -> float:
    """The last of the alternatives to the best, as far as they are known."""
    values = sorted((value for group in groups.values() for value in group.simulated.values()), reverse=True)
    return values[NUM_ALTERNATIVES] if len(values) > NUM_ALTERNATIVES else 0.0


def _bounded_groups(screen: ClusterQuestion, choices: Sequence[SystemChoice], known: Evaluations) -> dict[_GroupName, _Group]:
    known.report(f"bounding {len(choices)} choices")
    groups: dict[_GroupName, _Group] = {}
    limits = SearchLimits.of(screen.num_gpus)
    for choice in sorted(choices, key=lambda choice: (choice.group, choice.key)):
        most = expected = first_bound(screen, choice)
        if is_planned(choice.system) and choice.system.startswith(BOUND_TO_SHAPE):
            expected = min(most, expected_rate(screen, choice))
        stage = _Stage.BOUNDED if choice.shared_layers else _Stage.PROVEN
        groups.setdefault(choice.group, _Group(limits)).open[choice] = _OpenChoice(most, expected, stage)
    return groups


def _look_closer(
    screen: ClusterQuestion, groups: Mapping[_GroupName, _Group], wanted: Sequence[SystemChoice], known: Evaluations
) -> None:
    """Take every choice one stage further."""
    at = {stage: [choice for choice in wanted if groups[choice.group].open[choice].stage is stage] for stage in _Stage}
    bounds, steps, runs = known.look_closer(
        screen, at[_Stage.BOUNDED], at[_Stage.PROVEN], at[_Stage.ASKED], "looking at promising shapes"
    )
    for choice, refined in zip(at[_Stage.BOUNDED], bounds, strict=True):
        one = groups[choice.group].open[choice]
        one.most = refined.most
        one.expected, one.stage = min(one.expected, one.most), _Stage.PROVEN
    for choice, refined in zip(at[_Stage.PROVEN], steps, strict=True):
        _note_step(groups[choice.group], choice, refined, refined.most)
    for choice, simulated in zip(at[_Stage.ASKED], runs, strict=True):
        group = groups[choice.group]
        del group.open[choice]
        group.simulated[choice] = simulated.mean


def _note_step(group: _Group, choice: SystemChoice, refined: Refined, most: float) -> None:
    one = group.open[choice]
    group.fault_free[choice] = refined.fault_free
    one.most = one.expected = min(one.most, most)
    one.stage = _Stage.ASKED
    if not refined.fault_free:
        del group.open[choice]
        group.problem = group.problem or refined.problem


def _finalists(groups: Mapping[_GroupName, _Group]) -> list[SystemChoice]:
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
    left = max(0.0, group.most_left / group.best - 1) if group.best else 0.0
    problem = "" if found else group.problem or ("it makes no progress" if group.simulated else "no shape fits")
    return GroupResult(found[0] if found else None, left <= MARGIN, left, problem)
