"""Readings of the paper's table: what the paper leaves open, ReCycle with each choice, and what the cells cannot tell.

A reading changes one choice of the reproduction at a time, so that the page shows which choices the published cells decide.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean

from recycle.core.problem import Techniques
from recycle.sim.reproduce.experiment_result import ResultTable
from recycle.sim.reproduce.published_numbers import INTERVALS_H, PublishedRow

Cells = tuple[float, ...] | None
"""The throughput at each interval; None is out of memory."""

FEW_SEEDS = 5


@dataclass(frozen=True, slots=True)
class TableReading:
    """The choices of one simulation of ReCycle for the table; by default those of the reproduction.

    `microbatch_factor` and `depth_factor` multiply the number of micro-batches and of stages; the workers remain the same.
    """

    techniques: Techniques = field(default_factory=Techniques)
    microbatch_factor: float = 1.0
    depth_factor: float = 1.0
    moves: bool = False
    plans_fault_free: bool = False
    has_few_seeds: bool = False

    @property
    def planned(self) -> tuple[Techniques, float, float]:
        """The choices that decide which plans are made: readings that share them share their plans."""
        return self.techniques, self.microbatch_factor, self.depth_factor


REPRODUCED = "as in the first table"
ADAPTIVE = "adaptive alone"
DEFAULT = "our default: workers move, the planned schedule while nobody is dead"
READINGS = {
    REPRODUCED: TableReading(),
    ADAPTIVE: TableReading(Techniques(True, False, False)),
    "workers move": TableReading(moves=True),
    "the planned schedule while nobody is dead": TableReading(plans_fault_free=True),
    DEFAULT: TableReading(moves=True, plans_fault_free=True),
    f"{REPRODUCED} ({FEW_SEEDS} seeds)": TableReading(has_few_seeds=True),
    f"half as many micro-batches ({FEW_SEEDS} seeds)": TableReading(microbatch_factor=0.5, has_few_seeds=True),
    f"twice as many micro-batches ({FEW_SEEDS} seeds)": TableReading(microbatch_factor=2, has_few_seeds=True),
    f"half as many stages, twice the pipelines ({FEW_SEEDS} seeds)": TableReading(depth_factor=0.5, has_few_seeds=True),
    f"twice as many stages, half the pipelines ({FEW_SEEDS} seeds)": TableReading(depth_factor=2, has_few_seeds=True),
}

Found = Mapping[tuple[str, str], Cells]
"""The cells of each reading or system and each model."""


def reading_table(found: Found, rows: Sequence[PublishedRow], readings: Iterable[str]) -> ResultTable:
    """How far ReCycle is from its published cells under each reading, in all cells and in those in which somebody fails."""
    head = ["reading", "mean error", "mean error, 2 h and 0.5 h", "mean difference", "largest", *(row.model for row in rows)]
    body = []
    for reading in readings:
        by_model = [differences(found[reading, row.model], row.cells["recycle"]) for row in rows]
        every = [value for values in by_model for value in values]
        with_failures = [value for values in by_model for value in values[1:]]
        shown = [_error(every), _error(with_failures), _mean(every), f"{max(every, key=abs):+.1%}" if every else ""]
        body.append([reading, *shown, *map(_mean, by_model)])
    return ResultTable("ReCycle under other readings of the paper: differences from its published cells", [head, *body])


def table_findings(found: Found, rows: Sequence[PublishedRow], oobleck: Sequence[str]) -> list[str]:
    """What the table cannot tell, in sentences whose figures come from the cells; `oobleck` are its rows with shorter pauses."""
    off = {
        reading: [value for row in rows for value in differences(found[reading, row.model], row.cells["recycle"])]
        for reading in (REPRODUCED, ADAPTIVE, DEFAULT)
        if all((reading, row.model) in found for row in rows)
    }
    if len(off) < 3 or not off[REPRODUCED]:
        return []
    default, num_cells = off[DEFAULT], len(off[DEFAULT])
    techniques = (
        f"Which techniques ran. With all three, the cells of ReCycle have a mean error of {_error(off[REPRODUCED])}; with "
        f"Adaptive Pipelining alone, {_error(off[ADAPTIVE])}. A difference of that size does not "
        "show which of them the paper measured."
    )
    ours = (
        f"What this project does by default. It differs from the cells of ReCycle by {_error(default)} in the mean, and is above "
        f"them in {sum(value > 0 for value in default)} of {num_cells}, without elastic cuts: the assumptions above are those of "
        "the paper's system, as we read it, and not our defaults."
    )
    choices = (
        "Which choices are right. Micro-batches, shapes, moves and the fault-free schedule are not given with the published "
        "table. The last table changes each by itself."
    )
    pauses = []
    for name in oobleck:
        ahead = [
            f"{row.model} at {hours:g} h ({theirs:.2f} beside {here:.2f})"
            for row in rows
            for hours, theirs, here in zip(
                INTERVALS_H, found[name, row.model] or (), found[REPRODUCED, row.model] or (), strict=False
            )
            if theirs > here * 1.001
        ]
        where = f"ahead of the reproduced ReCycle in {', '.join(ahead)}" if ahead else "behind the reproduced ReCycle everywhere"
        pauses.append(f"{name[0].upper()}{name[1:]} is {where}.")
    return [techniques, ours, choices, " ".join(["How long Oobleck pauses.", *pauses])]


def differences(ours: Cells, published: Cells) -> list[float]:
    """By how much ours is above the published throughput at each interval; nothing where one is out of memory."""
    return [here / theirs - 1 for here, theirs in zip(ours, published, strict=True)] if ours and published else []


def _error(values: Sequence[float]) -> str:
    return f"{mean(map(abs, values)):.1%}" if values else ""


def _mean(values: Sequence[float]) -> str:
    return f"{mean(values):+.1%}" if values else ""
