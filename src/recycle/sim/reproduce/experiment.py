"""What an experiment gives: its assumptions in words, its tables, and the series of its picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Table:
    """A caption and rows of texts, the first of which is the head."""

    caption: str
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Bars:
    """One panel of a picture: for every series (a system) a value for every group; None where there is none."""

    title: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class Result:
    """An experiment: what it is called, under which assumptions, and what came out."""

    name: str
    title: str
    assumptions: Sequence[str]
    tables: Sequence[Table]
    panels: Sequence[Bars]
    axis: str
    groups: str
    facts: Mapping[str, Any] = field(default_factory=dict)
