"""`advise`: from a question to the first choice, its closest alternatives, the best of every system, and what would change it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recycle.core.errors import UserError
from recycle.sim.advise.choice_facts import ChoiceFacts
from recycle.sim.advise.choices import SystemChoice
from recycle.sim.advise.evaluations import Tick, evaluations
from recycle.sim.advise.question import ClusterQuestion, to_plain
from recycle.sim.advise.search import NUM_ALTERNATIVES, FoundChoice, GroupResult, SearchLimits, SearchResult, search
from recycle.sim.advise.verdict import Crossing, Sensitivity, sensitivity


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer to a question."""

    question: ClusterQuestion
    first: FoundChoice
    alternatives: Sequence[FoundChoice]
    found: SearchResult
    facts: Mapping[SystemChoice, ChoiceFacts]
    sensitivity: Sensitivity

    @property
    def best_fault_free(self) -> float:
        """The fault-free throughput of the fastest of all choices that were simulated to the end."""
        return max(one.fault_free for one in self.found.ranked)

    def throughput(self, one: FoundChoice) -> float:
        """Tokens a second, or samples if their tokens are not known."""
        return one.runs.mean * self.question.units_per_sample

    def rates(self, one: FoundChoice) -> tuple[float, float, float]:
        """The same, and the ends of its 90 % interval over seeds."""
        mean, each = self.throughput(one), one.runs.half_width * self.question.units_per_sample
        return mean, max(0.0, mean - each), mean + each

    def to_json(self) -> dict[str, Any]:
        return {
            "question": to_plain(self.question),
            "first": self._choice_json(self.first),
            "alternatives": [self._choice_json(one) for one in self.alternatives],
            "systems": [self._group_json(*item) for item in self.found.groups.items()],
            "thresholds": [_crossing_json(one) for one in self.sensitivity.crossings],
            "curves": {
                axis: [
                    {"choice": choice.to_json(), "samples_per_s": [[*point] for point in sorted(curve.items())]}
                    for choice, curve in curves.items()
                ]
                for axis, curves in self.sensitivity.curves.items()
            },
            "choices": {"all": self.found.num_choices, "asked": self.found.num_asked, "screened": self.found.num_screened},
        }

    def _choice_json(self, one: FoundChoice) -> dict[str, Any]:
        facts, known_tokens = self.facts[one.choice], self.question.model.sequence > 0
        return {
            **one.choice.to_json(),
            "spare_gpus": facts.spare_gpus,
            "memory_bytes": facts.memory_bytes,
            "samples_per_s": round(one.runs.mean, 6),
            "tokens_per_s": round(self.throughput(one), 3) if known_tokens else None,
            "interval_90": _interval(one, 1.0),
            "fault_free_samples_per_s": round(one.fault_free, 6),
            "goodput": round(one.runs.mean / one.fault_free, 6),
            "goodput_interval_90": _interval(one, one.fault_free),
            "of_best_fault_free": round(one.runs.mean / self.best_fault_free, 6),
            "of_best_fault_free_interval_90": _interval(one, self.best_fault_free),
            "time_shares": dict(one.runs.shares),
        }

    def _group_json(self, name: tuple[str, bool], group: GroupResult) -> dict[str, Any]:
        facts = {"system": name[0], "has_spares": name[1], "is_proven": group.is_proven, "left": round(group.left, 6)}
        if group.best is None:
            return {**facts, "best": None, "problem": group.problem}
        return {**facts, "best": self._choice_json(group.best)}


def _interval(one: FoundChoice, rate: float) -> list[float]:
    """The 90 % interval of the throughput as a share of `rate`: of the mean over seeds, which all choices share."""
    return [round(max(0.0, one.runs.mean + sign * one.runs.half_width) / rate, 6) for sign in (-1, 1)]


def _crossing_json(one: Crossing) -> dict[str, Any]:
    factor = None if one.factor is None else round(one.factor, 4)
    slower = round(one.slower, 6)
    return {"axis": one.axis, "rival": one.rival.to_json(), "factor": factor, "rival_is_slower_by": slower, "is_tie": one.is_tie}


def advise(
    question: ClusterQuestion,
    folder: Path | None,
    tick: Tick = lambda doing, done: None,
    num_processes: int | None = None,
) -> Advice:
    """Answer a question; what is found on the way is kept in `folder`, so that an interrupted call goes on from there.

    Raises a UserError if the model does not fit in any shape.
    """
    with evaluations(folder, tick, num_processes) as known:
        found = search(question, known)
        if not found.ranked:
            raise UserError(
                f"no system can train {question.model.name} on {question.num_gpus} {question.gpu.name}: "
                "take more GPUs, GPUs with more memory, or a larger --batch-tolerance"
            )
        first, alternatives = found.ranked[0], _alternatives(found.ranked)
        rivals = _rivals(found, alternatives, SearchLimits.of(question.num_gpus).most_rivals)
        changes = sensitivity(question, first.choice, rivals, known)
        shown = [first, *alternatives, *(group.best for group in found.groups.values() if group.best)]
        facts = known.facts(question, list(dict.fromkeys(one.choice for one in shown)), "measuring memory")
    return Advice(question, first, alternatives, found, facts, changes)


def _alternatives(ranked: Sequence[FoundChoice]) -> list[FoundChoice]:
    """The next best choices that are not the same layout with other cuts, and not another name of the same runs."""
    kept = [ranked[0]]
    for one in ranked[1:]:
        is_new = not any(
            one.choice.is_same_layout(other.choice)
            or (one.choice.system == other.choice.system and one.runs.rates == other.runs.rates)
            for other in kept
        )
        if is_new and len(kept) <= NUM_ALTERNATIVES:
            kept.append(one)
    return kept[1:]


def _rivals(found: SearchResult, alternatives: Sequence[FoundChoice], most: int) -> list[SystemChoice]:
    """The closest alternative, the own system with spares (or without), and the best of other systems, each once, up to `most`.

    Other shapes of a system react to failures like its best one, so that more of them would say little.
    """
    first = found.ranked[0].choice
    own = found.groups.get((first.system, not first.num_spare_servers))
    wanted = [*alternatives[:1], *([own.best] if own and own.best else [])]
    rivals = list(dict.fromkeys(one.choice for one in wanted))
    known = {first.system, *(choice.system for choice in rivals)}
    for one in found.ranked:
        if one.choice.system not in known and len(rivals) < most:
            rivals.append(one.choice)
            known.add(one.choice.system)
    return rivals
