"""Tables of throughput as a share of three references: fault-free 1F1B, the system's own without failures, the best schedule.

`sim/campaign/fault_free_rates.py` says what the references are. A table of each has the same form, so that a reader can hold one
beside the other; a table before them has the references themselves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recycle.sim.campaign.fault_free_rates import FaultFreeRates
from recycle.sim.campaign.mean_interval import MeanInterval
from recycle.sim.reproduce.experiment_result import ResultTable

REFERENCES = {
    "of 1F1B": "fault-free 1F1B",
    "of own": "the system's own throughput without failures",
    "of best": "the best fault-free schedule",
}


@dataclass(frozen=True, slots=True)
class ShareTables:
    """Rows of throughputs in samples a second, each with its fault-free rates; a column is a system.

    `labels` are the first cells of a row. A column whose name is not that of a system is one of `variants`: another reading of
    the system that is named there, with the same own rate.
    """

    head: Sequence[str]
    columns: Sequence[str]
    variants: Mapping[str, str] = field(default_factory=dict)
    rows: list[tuple[Sequence[str], Sequence[MeanInterval], FaultFreeRates]] = field(default_factory=list)

    def add(self, labels: Sequence[str], throughputs: Mapping[str, MeanInterval], rates: FaultFreeRates) -> None:
        self.rows.append((labels, [throughputs[column] for column in self.columns], rates))

    def tables(self, caption: str, references: Sequence[str] = tuple(REFERENCES)) -> list[ResultTable]:
        """One table for each reference."""
        return [ResultTable(f"{caption}, as a share of {REFERENCES[which]}", self._texts(which)) for which in references]

    def _texts(self, which: str) -> list[list[str]]:
        body = []
        for labels, throughputs, rates in self.rows:
            found = [self._share(which, column, value, rates) for column, value in zip(self.columns, throughputs, strict=True)]
            body.append([*labels, *("–" if share is None else share.text(3) for share in found)])
        return [[*self.head, *self.columns], *body]

    def _share(self, which: str, column: str, throughput: MeanInterval, rates: FaultFreeRates) -> MeanInterval | None:
        rate = reference_rate(which, self.variants.get(column, column), rates)
        return throughput.over(rate) if rate else None


def share_of(which: str, system: str, throughput: float, rates: FaultFreeRates) -> float | None:
    """The throughput of a system as a share of one of `REFERENCES`; None if the system cannot run the job at all."""
    rate = reference_rate(which, system, rates)
    return throughput / rate if rate else None


def reference_rate(which: str, system: str, rates: FaultFreeRates) -> float:
    """The throughput that one of `REFERENCES` is for a system; 0 if the system cannot run the job at all."""
    if which == "of own":
        return rates.own[system]
    return rates.best if which == "of best" else rates.one_f_one_b


def fault_free_table(rates: Mapping[str, FaultFreeRates], systems: Sequence[str], head: str) -> ResultTable:
    """Each system's own throughput without failures, and that of the best schedule, as shares of 1F1B: scheduling alone."""
    rows = [[head, *systems, "best", "whose"]]
    for name, found in rates.items():
        own = [found.own[system] / found.one_f_one_b for system in systems]
        best = found.best / found.one_f_one_b
        rows.append([name, *(f"{share:.3f}" if share else "–" for share in own), f"{best:.3f}", found.best_schedule])
    return ResultTable("Nobody is dead: throughput as a share of 1F1B, which is scheduling alone", rows)


def rate_facts(rates: FaultFreeRates) -> dict[str, Any]:
    """The fault-free rates for scripts: samples a second."""
    own = {system: round(rate, 6) for system, rate in rates.own.items()}
    return {"1F1B": round(rates.one_f_one_b, 6), "best": round(rates.best, 6), "best schedule": rates.best_schedule, "own": own}
