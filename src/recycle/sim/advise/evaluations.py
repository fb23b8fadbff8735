"""Evaluations: choices that were bounded or simulated, in a pool of processes, each kept in a file as soon as it is known.

The file of a question has a digest of the question in its name, so that a call that was interrupted goes on where it stopped, and
a question that was answered before is answered at once.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from recycle.core.errors import FileProblem
from recycle.core.events.record import Spell
from recycle.core.files import read_json, write_text
from recycle.host.process_pool import process_pool, submit
from recycle.sim.advise.choice_facts import ChoiceFacts, choice_facts
from recycle.sim.advise.choices import SystemChoice, is_planned, system_of, workers_per_server
from recycle.sim.advise.question import ClusterQuestion
from recycle.sim.advise.upper_bounds import Refined, refined_rate, shared_bound
from recycle.sim.campaign.mean_interval import mean_interval
from recycle.sim.campaign.trace_simulation import simulate_trace

FORMAT, VERSION = "recycle-advice-cache", 1
_STATES = ("train", "redo", "checkpoint", "pause", "down")

_Case = tuple[str, ClusterQuestion, SystemChoice]
"""What is to be evaluated, for which question and choice."""

_Key = tuple[str, str]
"""The digest of a question, and the name of an evaluation."""

Tick = Callable[[str, int], None]
"""Called with what is being done, and the number of evaluations so far."""


@dataclass(frozen=True, slots=True)
class SimulatedRuns:
    """The throughput of each seed in samples a second, and the share of all time in each state."""

    rates: tuple[float, ...]
    shares: Mapping[str, float]

    @property
    def mean(self) -> float:
        return mean(self.rates)

    @property
    def half_width(self) -> float:
        """Half of the 90 % interval of the mean over seeds, by Student's t; 0 for one seed, which has none."""
        return mean_interval(self.rates).half_width or 0.0


def simulate_choice(question: ClusterQuestion, choice: SystemChoice, folder: Path | None) -> SimulatedRuns:
    """Simulate a choice over every trace of the question."""
    system, shape = system_of(question, choice, folder), choice.shape
    each, hang_us = workers_per_server(question, choice.tensor_parallel), question.constants.hang_us_of(choice.system)
    rates, times = [], dict.fromkeys(_STATES, 0)
    for seed in question.seeds:
        trace = question.trace(shape.num_pipelines, shape.num_stages, seed, each)
        record = simulate_trace(system, trace, shape, question.constants.ready_us, hang_us)
        spells = [event for event in record if isinstance(event, Spell)]
        rates.append(round(sum(spell.samples for spell in spells) * 1e6 / trace.end_us, 9))
        for spell in spells:
            times[spell.state] += spell.length_us
    total = sum(times.values())
    return SimulatedRuns(tuple(rates), {state: round(time / total, 9) for state, time in times.items()})


FUNCTIONS: dict[str, Callable[[ClusterQuestion, SystemChoice, Path | None], Any]] = {
    "runs": simulate_choice,
    "step": refined_rate,
    "bound": shared_bound,
    "facts": choice_facts,
}


def _order(case: _Case) -> tuple[bool, int]:
    """What takes longest comes first, so that short evaluations fill the end: simulations and steps that need plans."""
    what, _, choice = case
    return not is_planned(choice.system), list(FUNCTIONS).index(what)


class Evaluations:
    """Bounds and simulations of choices, from memory, from the file of their question, or from the pool."""

    def __init__(self, folder: Path | None, pool: ProcessPoolExecutor | None, tick: Tick) -> None:
        self._folder, self._pool, self._tick = folder, pool, tick
        self._known: dict[str, dict[str, Any]] = {}
        self.num_simulated = 0

    def report(self, doing: str) -> None:
        self._tick(doing, self.num_simulated)

    def look_closer(
        self,
        question: ClusterQuestion,
        unproven: Sequence[SystemChoice],
        unasked: Sequence[SystemChoice],
        unsimulated: Sequence[SystemChoice],
        doing: str,
    ) -> tuple[list[Refined], list[Refined], list[SimulatedRuns]]:
        """Bound choices with shared layers; ask systems for their own fault-free steps, and ReCycle for some plans; simulate.

        All of it is submitted at once, so that no core waits between the three.
        """
        parts = {"bound": unproven, "step": unasked, "runs": unsimulated}
        before = self.num_simulated
        found = iter(self._get([(what, question, choice) for what, choices in parts.items() for choice in choices], doing))
        self.num_simulated = before + len(unsimulated)
        proven, asked = ([Refined(**next(found)) for _ in choices] for choices in (unproven, unasked))
        return proven, asked, [_runs(one) for one in found]

    def simulate(self, cases: Sequence[tuple[ClusterQuestion, SystemChoice]], doing: str) -> list[SimulatedRuns]:
        before = self.num_simulated
        found = self._get([("runs", *case) for case in cases], doing)
        self.num_simulated = before + len(cases)  # those that were known before among them
        return [_runs(one) for one in found]

    def facts(self, question: ClusterQuestion, choices: Sequence[SystemChoice], doing: str) -> dict[SystemChoice, ChoiceFacts]:
        """The layout and the memory of each choice."""
        found = self._get([("facts", question, choice) for choice in choices], doing)
        return {
            choice: ChoiceFacts(**{**one, "depths": tuple(one["depths"])}) for choice, one in zip(choices, found, strict=True)
        }

    def _get(self, cases: Sequence[_Case], doing: str) -> list[dict[str, Any]]:
        keys = [(question.digest, f"{what} {choice.key}") for what, question, choice in cases]
        missing = {}
        for key, case in zip(keys, cases, strict=True):
            if key[1] not in self._answers(key[0]):
                missing[key] = case
        self._tick(doing, self.num_simulated)
        for number, ((digest, name), result) in enumerate(self._results(missing), start=1):
            self._known[digest][name] = asdict(result)
            self._save(digest)
            self.num_simulated += name.startswith("runs ")
            self._tick(f"{doing}: {number} of {len(missing)}", self.num_simulated)
        return [self._known[digest][name] for digest, name in keys]

    def _results(self, cases: Mapping[_Key, _Case]) -> Iterator[tuple[_Key, Any]]:
        """Yield each result as soon as it is there, so that an interrupted call has lost only what was under way."""
        if self._pool is None:
            for key, (what, question, choice) in cases.items():
                yield key, FUNCTIONS[what](question, choice, self._folder)
            return
        futures = {}
        for key in sorted(cases, key=lambda key: _order(cases[key])):
            what, question, choice = cases[key]
            futures[submit(self._pool, FUNCTIONS[what], question, choice, self._folder)] = key
        yield from ((futures[future], future.result()) for future in as_completed(futures))

    def _answers(self, digest: str) -> dict[str, dict[str, Any]]:
        """What is known of a question; an unreadable file counts as empty."""
        if digest not in self._known:
            self._known[digest] = _read(self._path(digest)) if self._folder else {}
        return self._known[digest]

    def _path(self, digest: str) -> Path:
        assert self._folder is not None
        return self._folder / f"advice-{digest}.json"

    def _save(self, digest: str) -> None:
        if self._folder:
            data = {"format": FORMAT, "version": VERSION, "evaluations": self._known[digest]}
            write_text(self._path(digest), json.dumps(data, indent=0) + "\n")


def _runs(one: Mapping[str, Any]) -> SimulatedRuns:
    return SimulatedRuns(tuple(one["rates"]), one["shares"])


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        return {str(name): _checked(str(name), one) for name, one in read_json(path, FORMAT, VERSION)["evaluations"].items()}
    except (FileProblem, KeyError, TypeError, ValueError, AttributeError):
        return {}


def _checked(name: str, one: Any) -> dict[str, Any]:
    """An evaluation as it was written; raises TypeError or ValueError if it is not one."""
    if name.startswith(("bound ", "step ")):
        return asdict(Refined(float(one["most"]), float(one["fault_free"]), str(one["problem"])))
    if name.startswith("facts "):
        return asdict(ChoiceFacts(tuple(map(int, one["depths"])), int(one["memory_bytes"]), int(one["spare_gpus"])))
    rates = [float(rate) for rate in one["rates"]]
    if not rates or not all(math.isfinite(rate) and rate >= 0 for rate in rates):
        raise ValueError(f"{name} has no usable rates")
    return {"rates": rates, "shares": {state: float(one["shares"][state]) for state in _STATES}}


@contextmanager
def evaluations(folder: Path | None, tick: Tick, num_processes: int | None = None) -> Iterator[Evaluations]:
    """Evaluations in a pool of as many processes as there are cores, or in this process if that is one."""
    number = num_processes or os.cpu_count() or 1
    if number == 1:
        yield Evaluations(folder, None, tick)
        return
    with process_pool(number) as pool:
        yield Evaluations(folder, pool, tick)
