"""The results of a measured cluster: read from its folder, compared with the simulator's predictions, written as a page."""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from recycle.core.errors import FileProblem
from recycle.core.events.record import OpRan
from recycle.core.files import write_bytes, write_text
from recycle.core.op import Kind
from recycle.core.plans.plan import Plan
from recycle.core.profile import Profile
from recycle.evaluate.hardware.evaluation_folder import PROFILE
from recycle.evaluate.hardware.kills import PARTS, MeasuredRecovery, read_recoveries
from recycle.evaluate.hardware.race import SPANS, Trial, plan_path, read_trials
from recycle.evaluate.hardware.round_profiles import round_profiles
from recycle.evaluate.hardware.setup import ELASTIC, EMULATED, PACED_CORES, Setup
from recycle.evaluate.hardware.torch_contender import TORCH_1F1B
from recycle.evaluate.hardware.variants import (
    ADAPTIVE,
    CUT,
    DECOUPLED,
    FAULT_FREE,
    STAGGERED,
    Variant,
    baseline_name,
    chosen_variants,
    profile_of,
)
from recycle.evaluate.results.cluster_tables import (
    Requirement,
    VariantResult,
    error_requirements,
    errors_beforehand,
    errors_by_round,
    prediction_table,
    requirement_table,
    share_text,
    throughput_table,
    times_table,
)
from recycle.evaluate.results.elastic_requirements import elastic_requirements, without_contention
from recycle.profiling.emulated_device import EmulatedDevice
from recycle.report.record.contention_text import contention_text
from recycle.report.record.executed_iterations import Executed
from recycle.report.record.run_columns import read_run_record
from recycle.report.record.tables import markdown
from recycle.report.render.svg import draw_svg
from recycle.report.timeline.run_timeline import run_timeline
from recycle.sim.replay.expected_iteration import ExpectedIteration, expected_iteration

RESULTS, PICTURE, TIMELINE = "results", "throughput.png", "timeline.svg"
_LEAST_SHARE, _MEDIAN_ERROR, _WORST_ERROR = 0.97, 0.03, 0.08
# The largest relative difference that rounding makes within a few steps, in float32 and in bfloat16.
_ROUNDING = {"cpu": 1e-4, "cuda": 2e-2}


@dataclass(frozen=True, slots=True)
class ClusterResults:
    """The measurements of a cluster: by variant, with predictions, and by recovery."""

    setup: Setup
    profile: Profile
    variants: Sequence[VariantResult]
    recoveries: Sequence[MeasuredRecovery]

    @property
    def baseline(self) -> VariantResult:
        return next(result for result in self.variants if result.name == baseline_name(self.setup))

    @property
    def machine(self) -> str:
        return self.profile.taken.machine if self.profile.taken else self.profile.name

    @property
    def title(self) -> str:
        return f"{self.setup.num_workers} workers on {self.machine} ({self.setup.backend})"

    def to_json(self) -> dict[str, Any]:
        variants = []
        for result in self.variants:
            shares = {"share": result.share_of(self.baseline), "share_interval": result.share_interval(self.baseline)}
            variants.append({**asdict(result), "typical_us": result.typical_us, **shares})
        requirements = [asdict(one) for one in check_requirements(self.variants, self.setup)]
        return {"setup": asdict(self.setup), "machine": self.machine, "variants": variants, "requirements": requirements}


def read_results(folder: Path, setup: Setup, variants: Sequence[Variant]) -> ClusterResults:
    """Read every variant that was measured, and predict its iteration time from its plan."""
    trials, profiles, results = complete_rounds(list(read_trials(folder))), round_profiles(folder), list[VariantResult]()
    for variant in variants:
        own = [trial for trial in trials if trial.variant == variant.name]
        if not own:
            continue
        times_us = {trial.round: trial.iterations_us for trial in own}
        losses = {trial.round: trial.losses for trial in own}
        result = VariantResult(variant.name, variant.title, variant.dead, times_us, variant.num_samples(setup), losses)
        if not variant.is_torch:
            plan = Plan.load(plan_path(folder, variant))
            if variant.speeds and not variant.knows_speeds:
                plan = replace(plan, problem=replace(plan.problem, speeds=variant.speeds))
            first = plan.problem.profile
            known = {number: profile_of(variant, setup, profiles[number]) for number in times_us if number in profiles}
            predictions = {number: _predict(plan, known.get(number, first)) for number in times_us}
            result = replace(result, predictions=predictions, beforehand=_predict(plan, first))
        results.append(result)
    if baseline_name(setup) not in {result.name for result in results}:
        (title,) = (variant.title for variant in variants if variant.name == baseline_name(setup))
        raise FileProblem(f"{folder} has no measurement of {title}, the baseline of all other variants: run the part race first")
    return ClusterResults(setup, Profile.load(folder / PROFILE), results, read_recoveries(folder))


def complete_rounds(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials of the rounds in which every variant was measured; all trials if no round is complete.

    A round that was cut off would change the times of some variants only.
    """
    names = {trial.variant for trial in trials}
    complete = [trial for trial in trials if {other.variant for other in trials if other.round == trial.round} == names]
    return complete or list(trials)


def _predict(plan: Plan, profile: Profile) -> ExpectedIteration:
    return expected_iteration(replace(plan, problem=replace(plan.problem, profile=profile)))


def write_results(folder: Path, setup: Setup, variants: Sequence[Variant]) -> str:
    """Write the page, its numbers and its pictures; return the page."""
    from recycle.evaluate.results.cluster_chart import draw_cluster  # matplotlib takes half a second to import

    results = read_results(folder, setup, variants)
    page = "\n".join(_page(results))
    write_text(folder / f"{RESULTS}.md", page)
    write_text(folder / f"{RESULTS}.json", json.dumps(results.to_json(), indent=1) + "\n")
    write_bytes(folder / PICTURE, draw_cluster(results.variants, results.baseline, results.title))
    if (drawn := _timeline(folder, variants)) is not None:
        write_text(folder / TIMELINE, drawn)
    return page


def check_requirements(results: Sequence[VariantResult], setup: Setup) -> list[Requirement]:
    """Check every requirement on a measured cluster for which its variants were measured."""
    by_name = {result.name: result for result in results}
    baseline = by_name[baseline_name(setup)]
    is_elastic = setup.study == ELASTIC
    return [
        *(elastic_requirements(by_name, setup) if is_elastic else _degraded_requirements(by_name, baseline)),
        *(() if is_elastic else _fault_free_requirements(by_name, baseline)),
        *error_requirements(results, _MEDIAN_ERROR, _WORST_ERROR),
        _same_losses(results, setup),
    ]


def _degraded_requirements(by_name: dict[str, VariantResult], baseline: VariantResult) -> Iterator[Requirement]:
    steps = [by_name[name] for name in (ADAPTIVE, DECOUPLED, STAGGERED) if name in by_name]
    if len(steps) < 3:
        return
    references = [("one dead, all techniques, of fault-free 1F1B", baseline)]
    if TORCH_1F1B in by_name:
        references.append(("the same, of torch's fault-free 1F1B", by_name[TORCH_1F1B]))
    for what, other in references:
        is_met = steps[-1].share_of(other) >= _LEAST_SHARE
        yield Requirement(what, f"≥ {_LEAST_SHARE:.0%}", share_text(steps[-1], other), is_met)
    shares = [result.share_of(baseline) for result in steps]
    found = [f"{shares[0]:.1%}", *(f"× {share_text(after, before)}" for before, after in pairwise(steps))]
    yield Requirement("each technique adds to the one before", "> 100% each", " ".join(found), shares == sorted(set(shares)))


def _fault_free_requirements(by_name: dict[str, VariantResult], baseline: VariantResult) -> Iterator[Requirement]:
    if FAULT_FREE not in by_name:
        return
    ours = by_name[FAULT_FREE]
    is_faster = ours.share_of(baseline) > 1
    yield Requirement("fault-free, all techniques, of 1F1B", "> 100%", share_text(ours, baseline), is_faster)
    torchs = [result for result in by_name.values() if not result.is_predicted]
    if torchs:
        fastest = max(torchs, key=lambda result: result.share_of(baseline))
        what = f"the same, of the fastest of torch's ({fastest.title})"
        yield Requirement(what, "≥ 100%", share_text(ours, fastest), ours.share_of(fastest) >= 1)


def _same_losses(results: Sequence[VariantResult], setup: Setup) -> Requirement:
    """Every trial trains on the same samples from the same weights."""
    trials = [losses for result in results for losses in result.losses.values()]
    worst = max(abs(one / other - 1) for losses in trials for one, other in zip(losses, trials[0], strict=True))
    most = _ROUNDING[setup.device]
    return Requirement("losses of all trials, largest relative difference", f"≤ {most:g}", f"{worst:.1e}", worst <= most)


def _page(results: ClusterResults) -> Iterator[str]:
    setup, profile, variants = results.setup, results.profile, results.variants
    num_rounds = max(len(result.times_us) for result in variants)
    torch = f"torch {profile.taken.torch}" if profile.taken else ""
    yield f"# {results.title}\n"
    command = f"recycle bench cluster --workers {setup.num_workers} --backend {setup.backend}{' --small' * setup.is_small}"
    if setup.study == ELASTIC:
        command += f" --study {ELASTIC} --microbatches {setup.microbatches}"
    names = [result.name for result in variants]
    if len(names) < len(chosen_variants(setup, None)):
        command += f" --variants {','.join(names)}"
    options = f"--rounds {num_rounds} --iterations {len(variants[0].iterations_us) // num_rounds} --out FOLDER"
    yield f"Made by `{command} {options}`, {torch}.\n"
    shape = f"{setup.pipelines} pipelines of {setup.stages} stages, {setup.microbatches} micro-batches each of {setup.samples}"
    yield f"{shape} samples; {setup.model}."
    yield f"The same processes train by all variants in turn, in {num_rounds} rounds."
    yield "Iteration times are interquartile means over all rounds, beside the median and the quartiles. A share is the ratio of"
    yield "two throughputs; its 90 % bootstrap interval, by resampling rounds, is in brackets.\n"
    yield "Each round is predicted from a profile that the same processes measured in that round.\n"
    if setup.is_gpu:
        yield "All messages and reductions stay in the GPU's memory. torch's schedules use ReCycle's CUDA IPC transport for that,"
        yield "because gloo carries host memory only, and NCCL refuses two processes on one GPU.\n"
    yield f"![{results.title}]({PICTURE})\n"
    yield f"## Iteration times\n\n{markdown(throughput_table(variants, results.baseline))}\n"
    yield f"## Requirements\n\n{markdown(requirement_table(check_requirements(variants, setup)))}\n"
    if setup.backend == PACED_CORES:
        yield "Each worker computes its ops on a core of its own, and waits after each until the time has passed that it takes on"
        yield "a slow core. So workers are about equally fast, also where the host of a virtual machine makes some cores slower."
        assert setup.emulated is not None
        yield f"{_about_pace(profile, setup.emulated)}\n"
    elif setup.backend == EMULATED:
        yield "Ops are computed for real, by a model that is too small to matter, and then last as long as on a device of the"
        yield "worker's own: no two workers share one, and nothing is gained or lost by contention.\n"
    elif setup.study == ELASTIC:
        yield "## Contention told apart\n"
        yield "Workers that share a machine slow each other down. A dead worker leaves room for others, and so does a worker that"
        yield "waits. The last column is the prediction for workers with machines of their own.\n"
        yield f"{markdown(without_contention({result.name: result for result in variants}))}\n"
    yield f"## Prediction step by step\n\n{markdown(prediction_table(variants))}\n"
    yield (
        "A prediction is the median over rounds; its error is relative to the iteration time over all rounds. Round by round, "
        f"{_errors_text(errors_by_round(variants))}.\n"
    )
    yield "The first profile was measured before the first round; plans were made from it:\n"
    yield from (f"- {sentence}" for sentence in _about_profile(profile))
    yield f"- By this profile alone, {_errors_text(errors_beforehand(variants))}.\n"
    if results.recoveries:
        yield f"## Kills and rejoins\n\n{markdown(times_table(_times_us(results.recoveries)))}\n"
        yield f"{_about_redone(results.recoveries, setup)}\n"


def _about_pace(profile: Profile, pace: EmulatedDevice) -> str:
    asked = [(pace.op_us(kind, pace.num_layers), kind) for kind in (Kind.F, Kind.I, Kind.W)]
    found_us = {Kind.F: "forward_us", Kind.I: "input_us", Kind.W: "weight_us"}
    longer = [getattr(stage, found_us[kind]) / asked_us - 1 for stage in profile.stages for asked_us, kind in asked]
    return (
        f"In the first profile an op takes {median(longer):.1%} longer than this pace at the median over stages and kinds, and "
        f"{max(longer):.1%} at most."
    )


def _errors_text(errors: Sequence[float]) -> str:
    return f"predictions are {median(errors):.1%} off at the median and {max(errors):.1%} at worst"


def _about_profile(profile: Profile) -> Iterator[str]:
    num_peers = profile.taken.pipelines if profile.taken else 1
    yield (
        f"Links: a message to the next stage takes {profile.comm_us(0)} µs after its sender is free, a reduction over "
        f"{num_peers} peers {profile.reduce_us(0, num_peers)} µs."
    )
    yield f"Contention: {contention_text(profile)}."
    if profile.factors:
        yield (
            f"Uneven workers: the slowest took {profile.factors[-1]:.3f} of the median, the fastest {profile.factors[0]:.3f}; "
            f"ops of one worker vary by {profile.jitter:.1%}."
        )


def _about_redone(recoveries: Sequence[MeasuredRecovery], setup: Setup) -> str:
    redone = [one.redone_ops for one in recoveries if not one.joins]
    most = 3 * setup.num_workers * setup.microbatches  # F, I and W
    return (
        f"After a kill, the finished ops of the interrupted iteration are run again: {median(redone):.0f} ops at the median, "
        f"{max(redone)} at most, where an iteration has up to {most}."
    )


def _times_us(recoveries: Sequence[MeasuredRecovery]) -> dict[str, list[int]]:
    kills = [one for one in recoveries if not one.joins]
    return {
        "from a kill to the first op after it": [one.took_us for one in kills],
        **{f"part of it: {part}": [one.parts_us[part] for one in kills] for part in PARTS},
        "from a rejoin to the first op after it": [one.took_us for one in recoveries if one.joins],
    }


def _timeline(folder: Path, variants: Sequence[Variant]) -> str | None:
    """Draw a measured iteration of all techniques with a dead worker; None if it was not measured, or its spans were not kept."""
    variant = next((one for one in variants if one.name in (STAGGERED, CUT)), None)
    if variant is None or not (path := folder / SPANS / f"{variant.name}.json.gz").exists():
        return None
    plan = Plan.load(plan_path(folder, variant))
    rows: dict[str, list[list[list[Any]]]] = json.loads(gzip.decompress(path.read_bytes()))
    events = [
        OpRan(number, worker, label, start_us, end_us)
        for worker, iterations in rows.items()
        for number, spans in enumerate(iterations)
        for label, _, start_us, end_us in spans
    ]
    # The second iteration, if there is one: then blocks of the iteration before are drawn beside it, too.
    number = min(1, min(map(len, rows.values())) - 1)
    windows = Executed(plan, read_run_record(events).ops).windows(number)
    timeline = run_timeline(plan.problem, events, number, (f"{variant.dead} dead, as executed",), windows)
    return draw_svg(replace(timeline, about=("an iteration as measured", *timeline.about)))
