"""run_race: train all variants in turn by the same processes, round after round, and measure their iterations.

In a trial all workers start from the same weights, and train `WARM_UP` iterations that do not count before those that do.
"""

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from recycle.core.cluster import Worker
from recycle.core.errors import FileProblem
from recycle.core.op import Op
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import check
from recycle.core.profile import Profile
from recycle.evaluate.hardware.contenders import Contender, ContenderTurn, TurnResult
from recycle.evaluate.hardware.round_profiles import Rehearsal, round_path
from recycle.evaluate.hardware.setup import Setup
from recycle.evaluate.hardware.variants import Variant
from recycle.profiling.worker_pool import ChooseCores, WorkerPool, any_core, worker_pool
from recycle.runtime.execute.spans import Span

WARM_UP = 2
MEASURED, PLANS, SPANS = "measured.jsonl", "plans", "spans"
_One = TypeVar("_One")
_Other = TypeVar("_Other")


@dataclass(frozen=True, slots=True)
class Trial:
    """One turn of a variant: the times of the iterations that count, the losses of all, and the median of each kind of op."""

    round: int
    variant: str
    iterations_us: Sequence[int]
    losses: Sequence[float]
    ops_us: Mapping[str, int]

    @property
    def iteration_us(self) -> float:
        return sum(self.iterations_us) / len(self.iterations_us)


Progress = Callable[[Trial, int, int], None]
"""Called after every turn, with the number of turns so far and the number of all turns."""


def run_race(
    folder: Path,
    setup: Setup,
    variants: Sequence[Variant],
    num_rounds: int,
    num_iterations: int,
    progress: Progress,
    profile: Profile | None = None,
    choose_cores: ChooseCores = any_core,
) -> None:
    """Run the turns that are missing of `num_rounds` rounds; with a profile, rehearse in each round."""
    plans = {one.name: _plan(folder, setup, one) for one in variants if not one.is_torch}
    missing = _missing(folder, variants, num_rounds, is_rehearsed=profile is not None)
    if not missing:
        return
    num_turns, num_done = num_rounds * len(variants), num_rounds * len(variants) - sum(map(len, missing.values()))
    boundaries = setup.job(next(iter(plans.values()))).boundaries()
    (folder / SPANS).mkdir(exist_ok=True)
    make_contender = partial(Contender, setup, boundaries)
    preload = ["torch.distributed.pipelining"]
    with worker_pool(list(setup.shape.workers()), make_contender, preload, choose_cores) as pool:
        numbers = count(1)  # every turn has a transport of its own
        for number, todo in missing.items():
            rehearsal = None
            if profile is not None and not round_path(folder, number).exists():
                rehearsal = Rehearsal(folder, setup, number, profile)
            for step in interleaved(todo, rehearsal.runs if rehearsal else []):
                if not isinstance(step, Variant):
                    assert rehearsal is not None
                    rehearsal.do(step, pool, next(numbers))
                    continue
                turn = ContenderTurn(
                    next(numbers), step.name, WARM_UP + num_iterations, plans.get(step.name), step.pipelines(setup), step.speeds
                )
                trial, results = run_trial(pool, turn, number)
                if number == num_rounds - 1:
                    _keep_spans(folder / SPANS / f"{step.name}.json.gz", results)
                _append(folder / MEASURED, trial)
                num_done += 1
                progress(trial, num_done, num_turns)


def interleaved(turns: Sequence[_One], runs: Sequence[_Other]) -> Iterator[_One | _Other]:
    """Both in one sequence: runs evenly between the turns, the first before all of them."""
    index = 0
    for number, turn in enumerate(turns):
        while index < len(runs) and index * len(turns) <= number * len(runs):
            yield runs[index]
            index += 1
        yield turn
    yield from runs[index:]


def plan_path(folder: Path, variant: Variant) -> Path:
    return folder / PLANS / f"{variant.name}.json"


def _plan(folder: Path, setup: Setup, variant: Variant) -> Plan:
    path = plan_path(folder, variant)
    if not path.exists():
        raise FileProblem(f"there is no plan {path}: make the plans first, with recycle bench cluster --only plan")
    plan = Plan.load(path)
    if plan.problem.shape != variant.shape(setup) or plan.problem.cluster.failed != variant.failed:
        raise FileProblem(f"{path} is a plan for something else than {variant.title}: remove it, and plan again")
    if violations := check(plan):
        raise FileProblem(f"{path} is not a legal plan, {violations[0]}: remove it, and plan again")
    return plan


def _missing(folder: Path, variants: Sequence[Variant], num_rounds: int, is_rehearsed: bool) -> dict[int, list[Variant]]:
    """The turns that are missing, by round; a round may miss its rehearsal alone."""
    done = {(trial.round, trial.variant) for trial in read_trials(folder)}
    missing = {number: [one for one in variants if (number, one.name) not in done] for number in range(num_rounds)}
    return {
        number: todo for number, todo in missing.items() if todo or (is_rehearsed and not round_path(folder, number).exists())
    }


def run_trial(pool: WorkerPool, turn: ContenderTurn, number: int) -> tuple[Trial, Mapping[Worker, TurnResult]]:
    results = {worker: result for worker, result in pool.ask(turn).items() if result.ends_us}
    ends_us = [max(result.ends_us[iteration] for result in results.values()) for iteration in range(turn.num_iterations)]
    losses = [results[worker].losses for worker in sorted(results) if results[worker].losses]
    # Torch's last stages know their own pipeline's losses only; ours know those of all.
    means = [sum(own) / len(own) for own in zip(*losses, strict=True)]
    took = [after - before for before, after in pairwise(ends_us[WARM_UP - 1 :])]
    return Trial(number, turn.variant, took, means, _medians_us(results)), results


def _medians_us(results: Mapping[Worker, TurnResult]) -> dict[str, int]:
    """The median time of ops by kind: it shows whether a variant is slow, or the machine was."""
    times: dict[str, list[int]] = {}
    for result in results.values():
        for span in (span for spans in result.run.spans[WARM_UP:] for span in spans if span.is_op):
            times.setdefault(Op.parse(span.label, 0).kind.value, []).append(span.end_us - span.start_us)
    return {kind: round(median(took)) for kind, took in sorted(times.items())}


def _keep_spans(path: Path, results: Mapping[Worker, TurnResult]) -> None:
    """Write the spans of the iterations that count, in µs from the first of them on."""
    spans = {str(worker): result.run.spans[WARM_UP:] for worker, result in sorted(results.items()) if result.run.spans}
    if not spans:
        return
    zero_us = min(own[0][0].start_us for own in spans.values())
    rows = {worker: [[_row(span, zero_us) for span in one] for one in own] for worker, own in spans.items()}
    with gzip.GzipFile(path, "wb", mtime=0) as stream:
        stream.write(json.dumps(rows).encode())


def _append(path: Path, trial: Trial) -> None:
    """Add a line; a line that was cut off gets its end first, so that it does not spoil this one, too."""
    is_cut_off = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as stream:
        row = {**asdict(trial), "losses": [round(loss, 6) for loss in trial.losses]}
        stream.write("\n" * is_cut_off + json.dumps(row) + "\n")


def _row(span: Span, zero_us: int) -> list[Any]:
    """A span as it is written: label, when its worker was free for it (None after all ops), start and end."""
    asked_us = span.asked_us - zero_us if span.is_op else None
    return [span.label, asked_us, span.start_us - zero_us, span.end_us - zero_us]


def read_trials(folder: Path) -> Iterator[Trial]:
    """The turns that were measured; a line that was cut off is left out."""
    path = folder / MEASURED
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield Trial(**json.loads(line))
        except (ValueError, TypeError):
            continue
