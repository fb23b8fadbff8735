"""Ablation: the throughput with each technique, for the paper's three models and one to four dead workers."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recycle.core.problem import Techniques
from recycle.sim.campaign.fault_free_rates import fault_free_rates
from recycle.sim.iteration_times import IterationTimes, one_f_one_b_time
from recycle.sim.job import SimulatedJob
from recycle.sim.reproduce.experiment_result import BarPanel, ExperimentResult, ResultTable
from recycle.sim.reproduce.published_numbers import TABLE
from recycle.sim.reproduce.share_tables import REFERENCES
from recycle.sim.reproduce.throughput_table import published_job
from recycle.sim.systems.constants import Constants
from recycle.sim.systems.odyssey import rerouting_estimate_us
from recycle.sim.systems.registry import SystemContext

MOST_FAILURES = 4
ESTIMATE = "odyssey-rerouting"
STEPS = {
    "adaptive": Techniques(True, False, False),
    "+ decoupled": Techniques(True, True, False),
    "+ staggered": Techniques(True, True, True),
}


def run_ablation(folder: Path | None) -> ExperimentResult:
    """Return the throughput of each technique relative to fault-free 1F1B."""
    counts = range(1, MOST_FAILURES + 1)
    tables: list[ResultTable] = []
    panels: list[BarPanel] = []
    facts: dict[str, Any] = {}
    estimates = [["model, shape", *(f"{count} dead" for count in counts)]]
    for row in TABLE:
        job = published_job(row)
        base = one_f_one_b_time(job.problem(), folder)
        rates = fault_free_rates(SystemContext(job, Constants.for_model(job.model.num_parameters), folder), ())
        best = rates.best / rates.one_f_one_b
        found = {name: _shares(job, techniques, base.period_us, folder) for name, techniques in STEPS.items()}
        shares = {name: values[1:] for name, values in found.items()}
        shape = f"{row.model}, {row.num_pipelines} x {row.num_stages}"
        head = [shape, "nobody dead", *(f"{count} dead" for count in counts)]
        scaled = [1 - count / job.num_nodes for count in range(MOST_FAILURES + 1)]
        rows = {"fault-scaled": scaled, **found}
        whose = {"of best": f", {rates.best_schedule}"}
        tables += [
            ResultTable(
                f"Throughput of {row.model}, as a share of {text}{whose.get(which, '')}", [head, *_rows(which, rows, best)]
            )
            for which, text in REFERENCES.items()
        ]
        panels.append(BarPanel(row.model, [str(count) for count in counts], shares))
        ratios = _estimate_ratios(job, folder)
        estimates.append([shape, *(f"{ratio:.2f}" for ratio in ratios)])
        facts[row.model] = shares
        own = {name: values[0] for name, values in found.items()}
        facts[f"{row.model}/fault-free"] = {**own, "best": round(best, 6), "best schedule": rates.best_schedule}
        facts[f"{row.model}/{ESTIMATE}"] = {"period over that of our plan": ratios}
    tables.append(
        ResultTable("What later papers take for ReCycle: the period by Odyssey's estimate over that of our plan", estimates)
    )
    assumptions = (
        "shapes and costs as in `recycle reproduce table`: 16 x 2, 8 x 4 and 4 x 8 workers, 128 micro-batches in a step",
        "dead workers lie where they hurt least, for each set of techniques by itself (Failure Normalization)",
        "steady state: no pause is counted; nothing is random, so that there are no intervals",
        "of own: of the same techniques with nobody dead, so that faults alone count; of best: of anybody's best schedule",
        "Odyssey's estimate of the same dead workers sums over stages, and knows neither split backward nor staggered step",
        "1 is fault-free 1F1B: more than 1 means that splitting and staggering fill more bubbles than the dead workers cost",
    )
    return ExperimentResult(
        "ablation", "What each technique is worth", assumptions, tables, panels, "share of fault-free 1F1B", "dead workers", facts
    )


def _estimate_ratios(job: SimulatedJob, folder: Path | None) -> list[float]:
    """The period that Odyssey's estimate gives ReCycle over that of our plan for the same dead workers."""
    timings = IterationTimes(job.problem(), folder)
    found = timings.exactly(range(1, MOST_FAILURES + 1))
    live = [tuple(job.shape.num_pipelines - dead for dead in timing.distribution) for timing in found]
    pairs = zip(live, found, strict=True)
    return [round(rerouting_estimate_us(job, each) / timing.period_us, 6) for each, timing in pairs]


def _shares(job: SimulatedJob, techniques: Techniques, base_us: int, folder: Path | None) -> list[float]:
    """The throughput with nobody dead, one dead and so on, as shares of fault-free 1F1B."""
    timings = IterationTimes(job.problem(techniques), folder)
    timings.prepare(range(MOST_FAILURES + 1))
    return [round(base_us / timings.normalized(count).period_us, 6) for count in range(MOST_FAILURES + 1)]


def _rows(which: str, shares: Mapping[str, Sequence[float]], best: float) -> Iterator[list[str]]:
    """The shares of 1F1B as shares of one of `REFERENCES`; the first of a row is with nobody dead."""
    for name, values in {"fault-free 1F1B": [1.0] * (MOST_FAILURES + 1), **shares}.items():
        rate = {"of own": values[0], "of best": best}.get(which, 1.0)
        yield [name, *(f"{value / rate:.3f}" for value in values)]
