"""Results of `recycle reproduce` as rows: one for each case and system, with a column for each condition."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from recycle.dashboard.views.campaign_columns import (
    RATE,
    CampaignRow,
    TableColumn,
    bounds,
    finite_number,
    is_interval,
    is_number,
    named_numbers,
)

OF_1F1B = "share of fault-free 1F1B"
CONDITIONS = {
    "table": ("a failure every 6 h", "a failure every 2 h", "a failure every 0.5 h"),
    "ablation": ("1 dead", "2 dead", "3 dead", "4 dead"),
    "scale": ("1 % dead", "5 % dead", "10 % dead"),
    "slow": ("1 % slow", "5 % slow"),
}
"""What the numbers of a list stand for, in their order in the files."""

_CASES = {
    "table": "model",
    "ablation": "model",
    "scale": "cluster",
    "slow": "cluster",
    "thousand": "failures",
    "planner": "library",
}
_UNITS = {"table": RATE, "ablation": OF_1F1B, "scale": OF_1F1B, "slow": OF_1F1B}
_SINGLE = {"ablation": "nobody dead", "scale": "a month", "slow": "a day"}
_RATIO = "period over that of our plan"
_BEST = "best schedule"
SYSTEM = TableColumn("system")


@dataclass(frozen=True)
class ReproducedRows:
    """Collects the numbers of an experiment; those of one case and system are one row."""

    experiment: str
    rows: dict[tuple[str, str], CampaignRow] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)

    def add_results(self, results: dict[str, Any]) -> None:
        """Add all results of a file."""
        for key, value in results.items():
            if not isinstance(value, dict):
                self._add(key, "", value)
            elif key == "fault-free":
                for case, own in {"nobody fails": value}.items() if "1F1B" in value else value.items():
                    self._add_fault_free(case, own)
            elif key == "intervals":
                for case, systems in value.items():
                    self._add_systems(case, systems)
            elif key == "others" and self.experiment == "table":
                for name, values in value.items():
                    self._add(*_halves(name), values, "ours")
            elif key == "failures" and self.experiment == "thousand":
                self.left_out.add("failures of each seed")
            else:
                self._add_case(key, value)

    def _add_case(self, key: str, value: dict[str, Any]) -> None:
        case, part = _halves(key) if self.experiment in ("table", "ablation") else (key, "")
        if self.experiment == "planner" or (self.experiment not in _SINGLE and all(map(is_number, value.values()))):
            self._add(case, part, value)
        elif self.experiment == "table":
            for word in ("published", "ours"):
                self._add(case, part, value.get(word), word)
            self._add(case, part, value.get("intervals"), "ours")
            self._add(case, part, {"own": value.get("own")})
        elif self.experiment == "ablation" and part == "fault-free":
            named = {f"best: {value.get(_BEST)}" if name == "best" else name: one for name, one in value.items() if name != _BEST}
            self._add_systems(case, named)
        elif self.experiment == "ablation" and _RATIO in value:
            self._add(case, part, value[_RATIO], _RATIO, "×")
        else:
            self._add_systems(case, value)

    def _add_systems(self, case: str, systems: Any) -> None:
        for system, value in systems.items() if isinstance(systems, dict) else ():
            self._add(case, system, value)

    def _add_fault_free(self, case: str, facts: Any) -> None:
        if not isinstance(facts, dict):
            return
        own = facts.get("own")
        best = {f"best: {facts.get(_BEST)}": facts.get("best")}
        for system, rate in {"1F1B": facts.get("1F1B"), **best, **(own if isinstance(own, dict) else {})}.items():
            self._add(case, system, {"own": rate})

    def _add(self, case: str, system: str, value: Any, word: str = "", unit: str = "") -> None:
        """Add a number, a list of numbers or intervals by condition, or an object of named numbers."""
        unit, found = unit or _UNITS.get(self.experiment, ""), CampaignRow()
        if isinstance(value, dict) and not is_interval(value):
            found |= dict(named_numbers(value, self.left_out))
        elif isinstance(value, list):
            for name, one in zip(self._conditions(value), value, strict=True):
                found |= _cell(TableColumn(f"{word}, {name}" if word else name, unit), one)
        elif value is not None:
            found |= _cell(TableColumn(word or _SINGLE.get(self.experiment, "value"), unit), value)
        if any(number is not None for number in found.values()):
            texts: CampaignRow = {TableColumn(_CASES.get(self.experiment, "case")): case, **({SYSTEM: system} if system else {})}
            self.rows.setdefault((case, system), texts).update(found)

    def _conditions(self, values: Sequence[Any]) -> Sequence[str]:
        names = CONDITIONS.get(self.experiment, ())
        return names if len(names) == len(values) else [f"value {number + 1}" for number in range(len(values))]


def _cell(column: TableColumn, value: Any) -> CampaignRow:
    if is_interval(value):
        return dict(bounds(column, value["low"], value["high"]))
    return {column: finite_number(value)}


def _halves(name: str) -> tuple[str, str]:
    case, _, system = name.partition("/")
    return case, system
