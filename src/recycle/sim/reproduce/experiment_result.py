"""ExperimentResult: the assumptions, tables and bar charts of one experiment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ResultTable:
    """A caption and rows of texts; the first row is the head."""

    caption: str
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class BarPanel:
    """One panel of a bar chart: for every series (a system) a value for every group, or None."""

    title: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """The output of an experiment; `facts` are its numbers for scripts, `axis` and `groups` label the chart.

    `findings` say in sentences what the numbers do not show, with figures from them; `answer` says what they show.
    """

    name: str
    title: str
    assumptions: Sequence[str]
    tables: Sequence[ResultTable]
    panels: Sequence[BarPanel]
    axis: str
    groups: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    findings: Sequence[str] = ()
    answer: Sequence[str] = ()
