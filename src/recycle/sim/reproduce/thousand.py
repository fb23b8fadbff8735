"""The 1,024-GPU question: what does each system keep over 30 days, and how much of it is scheduling, how much fault handling?

Both are told apart in points of fault-free 1F1B: a system's own schedule without failures beside 1F1B is scheduling, and what it
loses of that own throughput is fault handling.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from recycle.core.cluster import Shape
from recycle.core.events.trace import Trace
from recycle.sim import failure_traces
from recycle.sim.campaign.campaign import Case, run_cases
from recycle.sim.campaign.fault_free_rates import FaultFreeRates, fault_free_rates, own_fault_free
from recycle.sim.campaign.mean_interval import MeanInterval, mean_interval
from recycle.sim.campaign.seed_results import seed_shares
from recycle.sim.reproduce.experiment_result import BarPanel, ExperimentResult, ResultTable
from recycle.sim.reproduce.scale import TENSOR_PARALLEL, scale_context, trace_rate
from recycle.sim.reproduce.share_tables import REFERENCES, rate_facts
from recycle.sim.systems.registry import BOUNDS, SYSTEMS, SystemContext

MODEL, GPU, SHAPE = "gpt-76.1b,microbatch=4", "h100", Shape(16, 8, 28)
DAYS, REJOIN_H, NUM_SEEDS = 30, 24, 10
FAILURE_DAYS = 264
# A failure in 264 GPU-days, and the rate of the Llama 3 run: 419 in 54 days on 16,384 GPUs, one in 264 days of 8 GPUs.
GPUS_OF_RATE = {f"one failure in {FAILURE_DAYS} GPU-days": 1, f"one failure in {FAILURE_DAYS} days of a server of 8 GPUs": 8}
# By default ReCycle shares layers if that pays with 5 and 10 % dead workers, which is more than die here.
SHARING = "recycle, 1 shared layer"
DRAWN = (
    "recycle",
    SHARING,
    "oobleck",
    "oobleck-zb",
    "replica-drop",
    "replica-drop-zb",
    "checkpoint-restart-spare",
    "checkpoint-restart-spare-zb",
)
COMPARED = ("checkpoint-restart-spare-zb", "replica-drop-zb", "oobleck-zb")
_DAY_US = 86_400_000_000

ASSUMPTIONS = (
    f"{MODEL.split(',')[0]} on 1,024 {GPU}: {SHAPE.num_pipelines} x {SHAPE.num_stages} workers of {TENSOR_PARALLEL} GPUs",
    f"{SHAPE.num_microbatches} micro-batches of 4 samples for each pipeline; a worker fails as a unit",
    f"{DAYS} days, {NUM_SEEDS} seeds, the same traces for all systems; a failed worker is back after {REJOIN_H} h",
    f"the question says one failure in {FAILURE_DAYS} GPU-days: first table",
    f"the Llama 3 run had one in {FAILURE_DAYS} days of a server, an eighth of it (419 in 54 days on 16,384 GPUs): second table",
    "pauses and checkpoints are the default constants of `recycle simulate`",
    "own schedule: throughput while nobody is dead, over 1F1B; the next three are shares over the whole time",
    "± is half of the 90 % interval of a mean over seeds (Student's t)",
    "points are of fault-free 1F1B: scheduling is own schedule - 1, faults what failures cost; 100 + both is the share of 1F1B",
    "-zb has a zero-bubble schedule in place of 1F1B; nobody has built oobleck-zb, which chooses the depth of its pipelines",
    "spares of checkpoint-restart-spare are machines beside the 1,024, always at hand and free of charge",
    "replica-drop trains with a smaller batch while a pipeline is away, so that its samples are not the same training",
    f"{SHARING}: recycle shares none by default here, because more does not pay with 5 % of the workers dead",
    "ideal and resihp are bounds: nobody can run them",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One system at one failure rate: samples a second for each seed, its own without failures, and fault-free 1F1B."""

    throughputs: tuple[float, ...]
    own: float
    one_f_one_b: float

    @property
    def scheduling(self) -> float:
        """Points of fault-free 1F1B that the system's schedule is above it."""
        return 100 * (self.own / self.one_f_one_b - 1)

    @property
    def faults(self) -> MeanInterval:
        """Points of fault-free 1F1B that failures cost, a negative number."""
        return mean_interval([100 * (rate - self.own) / self.one_f_one_b for rate in self.throughputs])

    @property
    def goodputs(self) -> tuple[float, ...]:
        """The goodput of every seed, in percent."""
        return tuple(100 * rate / self.own for rate in self.throughputs)


def run_thousand(folder: Path | None, tick: Callable[[int], None] = lambda done: None) -> ExperimentResult:
    """Return the shares of every system at both failure rates, and what is scheduling and what is fault handling."""
    context = scale_context(MODEL, GPU, SHAPE, folder)
    rates = _rates(context)
    cases = [(rate, name, trace) for rate, gpus in GPUS_OF_RATE.items() for trace in _traces(gpus) for name in rates.own]
    records = run_cases([_case(context, name, trace) for _, name, trace in cases], tick)
    found: dict[tuple[str, str], list[float]] = {}
    for (rate, name, trace), record in zip(cases, records, strict=True):
        found.setdefault((rate, name), []).append(trace_rate(record, trace))
    answers = {
        rate: {name: Answer(tuple(found[rate, name]), rates.own[name], rates.one_f_one_b) for name in rates.own}
        for rate in GPUS_OF_RATE
    }
    tables = [ResultTable(f"{DAYS} days with {rate}", _rows(own, rates)) for rate, own in answers.items()]
    facts: dict[str, Any] = {rate: {name: _facts(name, one, rates) for name, one in own.items()} for rate, own in answers.items()}
    facts["fault-free"] = rate_facts(rates)
    facts["failures"] = {rate: [trace.num_failures for trace in _traces(gpus)] for rate, gpus in GPUS_OF_RATE.items()}
    panels = [
        BarPanel(rate, list(REFERENCES), {name: _bars(name, own[name], rates) for name in DRAWN}) for rate, own in answers.items()
    ]
    answer = [sentence for rate, own in answers.items() for sentence in sentences(rate, own, rates)]
    title, axis = "1,024 GPUs for 30 days", "share"
    return ExperimentResult("thousand", title, ASSUMPTIONS, tables, panels, axis, "", facts, answer=answer)


def sentences(rate: str, answers: Mapping[str, Answer], rates: FaultFreeRates) -> Iterator[str]:
    """The answer in words: what of ReCycle's share is scheduling, and how it handles failures beside systems without bubbles."""
    ours, sharing = answers["recycle"], answers[SHARING]
    share = 100 + ours.scheduling + ours.faults.mean
    yield (
        f"**With {rate}**, ReCycle is at {share:.1f} % of fault-free 1F1B: {ours.scheduling:+.1f} points are its zero-bubble "
        f"schedule, which is no fault handling, and {_points(ours.faults)} points are what failures cost. It keeps "
        f"{_percent(ours.goodputs)} of its own fault-free throughput, and {_percent(_best_shares(ours, rates))} of the best "
        f"fault-free schedule ({rates.best_schedule})."
    )
    beside = []
    for name in COMPARED:
        other = answers[name]
        gains = [one - two for one, two in zip(ours.goodputs, other.goodputs, strict=True)]
        beside.append(f"{name} {_percent(other.goodputs)} of its own ({_points(mean_interval(gains))} points for ReCycle)")
    yield f"Fault handling alone, where each has a schedule without bubbles: {'; '.join(beside)}."
    yield (
        f"Scheduling leaves ReCycle {100 * (1 - ours.own / rates.best):.1f} % below the best schedule with nobody dead. With one "
        f"shared layer that is {100 * (1 - sharing.own / rates.best):.1f} %, and its share of the best schedule "
        f"{_percent(_best_shares(sharing, rates))}, at {_percent(sharing.goodputs)} of its own."
    )
    first = max((name for name in answers if name not in BOUNDS), key=lambda name: fmean(answers[name].throughputs))
    live = answers["fault-scaled"].goodputs
    yield (
        f"Both together: {first} trains most samples, {_percent(_shares_of_1f1b(answers[first]))} of fault-free 1F1B. "
        f"{_percent(live)} of the workers are alive in the mean; a goodput above that means that the fault-free schedule "
        "waits for its largest stages, so that dead workers cost less where they are moved to smaller ones."
    )


def _rates(context: SystemContext) -> FaultFreeRates:
    """The fault-free rates of all systems, with `SHARING` behind ReCycle."""
    rates = fault_free_rates(context, SYSTEMS)
    sharing = own_fault_free(replace(context, shared_layers=1), "recycle")
    own = {"recycle": rates.own["recycle"], SHARING: sharing} | dict(rates.own)
    return replace(rates, own=own)


def _case(context: SystemContext, name: str, trace: Trace) -> Case:
    if name == SHARING:
        return Case("recycle", replace(context, shared_layers=1), trace)
    return Case(name, context, trace)


def _traces(gpus_of_rate: int) -> list[Trace]:
    """A trace for each seed, where so many GPUs fail once in `FAILURE_DAYS`."""
    nodes = failure_traces.worker_names(SHAPE.num_pipelines, SHAPE.num_stages)
    mtbf_us = FAILURE_DAYS * _DAY_US * gpus_of_rate // TENSOR_PARALLEL
    rejoin_us = REJOIN_H * 3_600_000_000
    return [failure_traces.poisson_trace(nodes, mtbf_us, DAYS * _DAY_US, seed, rejoin_us) for seed in range(1, NUM_SEEDS + 1)]


def _rows(answers: Mapping[str, Answer], rates: FaultFreeRates) -> list[list[str]]:
    rows = [["system", "own schedule", *REFERENCES, "scheduling, points", "faults, points"]]
    for name, answer in answers.items():
        if not answer.own:
            rows.append([name, "–", *["–"] * len(REFERENCES), "–", "does not fit"])
            continue
        _, *shares = seed_shares(name, answer.throughputs, rates).values()
        texts = ["–" if share is None else _points(share, 100) for share in shares]
        label = f"{name} (bound)" if name in BOUNDS else name
        rows.append(
            [label, f"{answer.own / answer.one_f_one_b:.3f}", *texts, f"{answer.scheduling:+.1f}", _points(answer.faults)]
        )
    return rows


def _bars(name: str, answer: Answer, rates: FaultFreeRates) -> list[float | None]:
    _, *shares = seed_shares(name, answer.throughputs, rates).values()
    return [None if share is None else share.mean for share in shares]


def _facts(name: str, answer: Answer, rates: FaultFreeRates) -> dict[str, Any]:
    shares = seed_shares(name, answer.throughputs, rates)
    found: dict[str, Any] = {key: None if share is None else share.to_json() for key, share in shares.items()}
    if answer.own:
        found |= {"scheduling_points": round(answer.scheduling, 6), "fault_points": answer.faults.to_json()}
    return {**found, "throughputs": [round(rate, 6) for rate in answer.throughputs]}


def _shares_of_1f1b(answer: Answer) -> Sequence[float]:
    return [100 * rate / answer.one_f_one_b for rate in answer.throughputs]


def _best_shares(answer: Answer, rates: FaultFreeRates) -> Sequence[float]:
    return [100 * rates.best_share(rate) for rate in answer.throughputs]


def _percent(values: Sequence[float]) -> str:
    """Percentages as their mean and half of its interval."""
    mean, half_width = mean_interval(values)
    return f"{mean:.1f} %" if half_width is None else f"{mean:.1f} ± {half_width:.1f} %"


def _points(interval: MeanInterval, factor: int = 1) -> str:
    mean, half_width = interval
    text = f"{factor * mean:.1f}" if factor > 1 else f"{mean:+.1f}"
    return text if half_width is None else f"{text} ± {factor * half_width:.1f}"
