"""What came of a measured cluster: read from its folder, set beside what the simulator expects, and written as a page."""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from recycle.cli.measuring.profile_text import contention_text
from recycle.core.errors import FileProblem
from recycle.core.events.record import OpRan
from recycle.core.files import write_bytes, write_text
from recycle.core.plans.plan import Plan
from recycle.core.profile import Profile
from recycle.evaluate.hardware.kills import PARTS, MeasuredRecovery, read_recoveries
from recycle.evaluate.hardware.race import SPANS, Trial, plan_path, read_trials
from recycle.evaluate.hardware.round_profiles import round_profiles
from recycle.evaluate.hardware.setup import Setup
from recycle.evaluate.hardware.torch_contender import TORCH_1F1B
from recycle.evaluate.hardware.variants import ADAPTIVE, DECOUPLED, FAULT_FREE, ONE_F_ONE_B, STAGGERED, Variant
from recycle.evaluate.results.cluster_tables import (
    Asked,
    Line,
    Prediction,
    asked_table,
    errors_asked,
    errors_beforehand,
    errors_by_round,
    prediction_table,
    share_text,
    throughput_table,
    times_table,
)
from recycle.report.record.tables import markdown
from recycle.report.render.svg import draw_svg
from recycle.report.timeline.run_timeline import run_timeline
from recycle.sim.replay.expected_iteration import expected_iteration

KEPT, MEDIAN_ERROR, WORST_ERROR = 0.97, 0.03, 0.08
RESULTS, PICTURE, TIMELINE = "results", "throughput.png", "timeline.svg"
# What rounding makes of the same mathematics within a few steps, in float32 and in bfloat16.
_ROUNDING = {"cpu": 1e-4, "cuda": 2e-2}


def read_lines(folder: Path, setup: Setup, variants: Sequence[Variant]) -> list[Line]:
    """Every variant that was measured, with what is expected of its plan."""
    heats, profiles, lines = whole_rounds(list(read_trials(folder))), round_profiles(folder), list[Line]()
    for variant in variants:
        own = [heat for heat in heats if heat.variant == variant.name]
        if not own:
            continue
        times_us = {heat.round: heat.iterations_us for heat in own}
        losses = {heat.round: heat.losses for heat in own}
        line = Line(variant.name, variant.title, variant.dead, times_us, variant.num_samples(setup), losses)
        if not variant.is_torch:
            plan = Plan.load(plan_path(folder, variant))
            line = replace(line, predictions=_predictions(plan, profiles, list(times_us)), beforehand=_prediction(plan))
        lines.append(line)
    if ONE_F_ONE_B not in {line.name for line in lines}:
        raise FileProblem(f"{folder} has no measurement of 1F1B, beside which all others are set: run the race first")
    return lines


def whole_rounds(heats: Sequence[Trial]) -> list[Trial]:
    """Without rounds in which a variant is missing, so that a slow one is not that of the others alone; all, if all are such."""
    names = {heat.variant for heat in heats}
    whole = [heat for heat in heats if {other.variant for other in heats if other.round == heat.round} == names]
    return whole or list(heats)


def _predictions(plan: Plan, profiles: Mapping[int, Profile], rounds: Sequence[int]) -> dict[int, Prediction]:
    """What is expected of a plan in each round, by that round's own profile."""
    made: dict[int, Prediction] = {}
    for number in rounds:
        profile = profiles.get(number, plan.problem.profile)
        made[number] = _prediction(replace(plan, problem=replace(plan.problem, profile=profile)))
    return made


def _prediction(plan: Plan) -> Prediction:
    return Prediction(**asdict(expected_iteration(plan)))


def write_results(folder: Path, setup: Setup, variants: Sequence[Variant], profile: Profile, command: str) -> str:
    """Write the page, its numbers and its pictures; return the page."""
    from recycle.evaluate.results.cluster_chart import draw_cluster  # matplotlib takes half a second to import

    lines, recoveries = read_lines(folder, setup, variants), read_recoveries(folder)
    yardstick = _line(lines, ONE_F_ONE_B)
    machine = profile.taken.machine if profile.taken else profile.name
    title = f"{setup.num_workers} workers on {machine} ({setup.backend})"
    asked = judged(lines, setup)
    page = "\n".join(_page(title, command, setup, profile, lines, yardstick, recoveries, asked))
    facts = {
        "setup": setup.to_json(),
        "machine": machine,
        "lines": [_facts(line, yardstick) for line in lines],
        "asked": [asdict(one) for one in asked],
    }
    write_text(folder / f"{RESULTS}.md", page)
    write_text(folder / f"{RESULTS}.json", json.dumps(facts, indent=1) + "\n")
    write_bytes(folder / PICTURE, draw_cluster(lines, yardstick, title))
    if (drawn := _timeline(folder, variants)) is not None:
        write_text(folder / TIMELINE, drawn)
    return page


def _facts(line: Line, yardstick: Line) -> dict[str, Any]:
    shares = {"share": line.share_of(yardstick), "share_between": line.share_between(yardstick)}
    return {**asdict(line), "typical_us": line.typical_us, **shares}


def judged(lines: Sequence[Line], setup: Setup) -> list[Asked]:
    """What is asked of a measured cluster, as far as it was measured."""
    by_name = {line.name: line for line in lines}
    yardstick = by_name[ONE_F_ONE_B]
    made = [*_kept(by_name, yardstick), *_fault_free(by_name, yardstick)]
    return [*made, *errors_asked(lines, MEDIAN_ERROR, WORST_ERROR), _same_losses(lines, setup)]


def _kept(by_name: dict[str, Line], yardstick: Line) -> Iterator[Asked]:
    steps = [by_name[name] for name in (ADAPTIVE, DECOUPLED, STAGGERED) if name in by_name]
    if len(steps) == 3:
        shares = [line.share_of(yardstick) for line in steps]
        found = share_text(steps[-1], yardstick)
        yield Asked("one dead, all techniques, of fault-free 1F1B", f"≥ {KEPT:.0%}", found, shares[-1] >= KEPT)
        if TORCH_1F1B in by_name:
            theirs = by_name[TORCH_1F1B]
            is_kept = steps[-1].share_of(theirs) >= KEPT
            yield Asked("the same, of torch's fault-free 1F1B", f"≥ {KEPT:.0%}", share_text(steps[-1], theirs), is_kept)
        told = [f"{shares[0]:.1%}", *(f"× {share_text(after, before)}" for before, after in pairwise(steps))]
        yield Asked("each technique adds to the one before", "> 100% each", " ".join(told), shares == sorted(set(shares)))


def _fault_free(by_name: dict[str, Line], yardstick: Line) -> Iterator[Asked]:
    if FAULT_FREE not in by_name:
        return
    ours = by_name[FAULT_FREE]
    is_faster = ours.share_of(yardstick) > 1
    yield Asked("fault-free, all techniques, of 1F1B", "> 100%", share_text(ours, yardstick), is_faster)
    theirs = [line for line in by_name.values() if not line.is_predicted]
    if theirs:
        fastest = max(theirs, key=lambda line: line.share_of(yardstick))
        what = f"the same, of the fastest of torch's ({fastest.title})"
        yield Asked(what, "≥ 100%", share_text(ours, fastest), ours.share_of(fastest) >= 1)


def _same_losses(lines: Sequence[Line], setup: Setup) -> Asked:
    """Every turn trains on the same samples from the same weights."""
    turns = [losses for line in lines for losses in line.losses.values()]
    worst = max(abs(one / other - 1) for losses in turns for one, other in zip(losses, turns[0], strict=True))
    most = _ROUNDING[setup.device]
    return Asked("losses of all turns, largest relative difference", f"≤ {most:g}", f"{worst:.1e}", worst <= most)


def _page(
    title: str,
    command: str,
    setup: Setup,
    profile: Profile,
    lines: Sequence[Line],
    yardstick: Line,
    recoveries: Sequence[MeasuredRecovery],
    asked: Sequence[Asked],
) -> Iterator[str]:
    num_rounds = max(len(line.times_us) for line in lines)
    torch = f"torch {profile.taken.torch}" if profile.taken else ""
    yield f"# {title}\n"
    options = f"--rounds {num_rounds} --iterations {len(lines[0].iterations_us) // num_rounds} --out FOLDER"
    yield f"Made by `{command} {options}`, {torch}.\n"
    shape = f"{setup.pipelines} pipelines of {setup.stages} stages, {setup.microbatches} micro-batches each of {setup.samples}"
    yield f"{shape} samples; {setup.model}."
    yield f"All variants in turns by the same processes, {num_rounds} rounds;"
    yield "times are means of the middle half of all iterations, beside their median and quartiles. A share is of these means; it"
    yield "lies between those in brackets in nine of ten cases if as many rounds are drawn from these by chance (bootstrap).\n"
    yield "The profile from which a round is predicted is rehearsed in that round, by the same processes.\n"
    if setup.is_gpu:
        yield "All messages and sums stay in the GPU's memory; torch's schedules use our links for that, because gloo knows host"
        yield "memory only, and NCCL refuses two processes on one GPU.\n"
    yield f"![{title}]({PICTURE})\n"
    yield f"## What an iteration takes\n\n{markdown(throughput_table(lines, yardstick))}\n"
    yield f"## What was asked\n\n{markdown(asked_table(asked))}\n"
    yield f"## How the prediction comes about\n\n{markdown(prediction_table(lines))}\n"
    yield f"{_about_rounds(lines)}\n"
    yield "Beforehand, there was one profile, taken before the race; plans were made from it:\n"
    yield "\n".join(f"- {sentence}" for sentence in [*_about_profile(profile), *_about_beforehand(lines)]) + "\n"
    if recoveries:
        yield f"## Killed and back\n\n{markdown(times_table(_times_us(recoveries)))}\n"
        yield f"{_about_redone(recoveries, setup)}\n"


def _about_profile(profile: Profile) -> Iterator[str]:
    num_peers = profile.taken.pipelines if profile.taken else 1
    yield (
        f"Links: a message to the next stage takes {profile.comm_us(0)} µs after its sender is free, a reduction over "
        f"{num_peers} peers {profile.reduce_us(0, num_peers)} µs."
    )
    yield f"Crowd: {contention_text(profile)}."
    if profile.factors:
        yield (
            f"Uneven workers: the slowest took {profile.factors[-1]:.3f} of the median, the fastest {profile.factors[0]:.3f}; "
            f"ops of one worker vary by {profile.jitter:.1%}."
        )


def _about_rounds(lines: Sequence[Line]) -> str:
    errors = errors_by_round(lines)
    return (
        "A prediction is the median over rounds, beside what is typical of all iterations. Round by round, predictions are "
        f"{median(errors):.1%} off at the median and {max(errors):.1%} at worst."
    )


def _about_beforehand(lines: Sequence[Line]) -> Iterator[str]:
    if errors := errors_beforehand(lines):
        yield f"By it alone, predictions are {median(errors):.1%} off at the median and {max(errors):.1%} at worst."


def _about_redone(recoveries: Sequence[MeasuredRecovery], setup: Setup) -> str:
    """What comes on top of the time to the first op: the iteration that was under way is done again."""
    redone = [one.redone_ops for one in recoveries if not one.joins]
    most = 3 * setup.num_workers * setup.microbatches  # F, I and W
    return (
        f"After a kill, what had been done of the iteration under way is done again: {median(redone):.0f} ops at the median, "
        f"{max(redone)} at most, where an iteration has up to {most}."
    )


def _times_us(recoveries: Sequence[MeasuredRecovery]) -> dict[str, list[float]]:
    kills = [one for one in recoveries if not one.joins]
    joins = [one for one in recoveries if one.joins]
    parts = {f"of it: {part}": [float(one.parts_us[part]) for one in kills] for part in PARTS}
    return {
        "a kill to the first op after it": [float(one.took_us) for one in kills],
        **parts,
        "a return to the first op after it": [float(one.took_us) for one in joins],
    }


def _timeline(folder: Path, variants: Sequence[Variant]) -> str | None:
    """The iteration of all techniques with a dead worker, as it ran."""
    variant = next(one for one in variants if one.name == STAGGERED)
    path = folder / SPANS / f"{variant.name}.json.gz"
    if not path.exists():
        return None
    plan = Plan.load(plan_path(folder, variant))
    rows: dict[str, list[list[list[Any]]]] = json.loads(gzip.decompress(path.read_bytes()))
    events = [
        OpRan(number, worker, label, start_us, end_us)
        for worker, iterations in rows.items()
        for number, spans in enumerate(iterations)
        for label, _, start_us, end_us in spans
    ]
    # Not the first that counts, if there are more: what lies beside it is then of other iterations.
    number = min(1, min(map(len, rows.values())) - 1)
    timeline = run_timeline(plan.problem, events, number, (f"{variant.dead} dead, as it ran",))
    return draw_svg(replace(timeline, about=("an iteration as measured", *timeline.about)))


def _line(lines: Sequence[Line], name: str) -> Line:
    return next(line for line in lines if line.name == name)
