"""`recycle plan`: one plan for a set or a number of failures, or a whole library of plans."""

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import TimeRemainingColumn

from recycle.cli.arguments import Subparsers, add_command, add_shape_options, output_path
from recycle.cli.profile_text import mismatch_note
from recycle.cli.terminal import progress_bar
from recycle.core.errors import UserError
from recycle.core.files import refuse_unwritable
from recycle.core.plans.library import without_failures
from recycle.core.plans.memory_use import MemoryUse, memory_use
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import PlanAssignment, RunLayers
from recycle.core.plans.rules import makespan_us, peak_in_flight
from recycle.core.problem import Problem, Techniques
from recycle.core.units import format_bytes, format_us, parse_duration_us, parse_share_or_count
from recycle.host.process_pool import process_pool, submit
from recycle.planner.build_library import LIBRARY_EFFORT, Built, build
from recycle.planner.failure_normalization import Distribution, least_bound, most_failures
from recycle.planner.heuristic.greedy import DEFAULT_EFFORT
from recycle.planner.kept_throughput import KeptThroughput, fault_free_period_us, fault_free_problem, kept_throughput
from recycle.planner.live_planner import Planner
from recycle.planner.problem_from_text import problem as describe
from recycle.planner.shared_layers_choice import AUTO, SharedLayersChoice, choose_shared_layers
from recycle.planner.solve import METHODS, solve, solve_normalized
from recycle.report.timeline.plan_timeline import cut_share

# A plan of so many ops takes so long that the one to compare it with is made in a process of its own at the same time.
_LARGE_OPS = 200_000
_EXAMPLES = """\
examples:
  the paper's worked example: worker 1 of stage 2 is dead, 6 micro-batches fit everywhere
    recycle plan --pipelines 3 --stages 4 --microbatches 6 --fail W1_2 --costs 1,1,1 --memory 6 --out plan.json
  the same without Decoupled BackProp and Staggered Optimizer
    recycle plan --pipelines 3 --stages 4 --microbatches 6 --fail W1_2 --costs 1,1,1 --memory 6 --techniques adaptive
  classic 1F1B, no failure
    recycle plan --pipelines 3 --stages 4 --microbatches 6 --costs 1,1,1 --techniques none
  the best plan for any 12 failures, from an estimated profile, as JSON
    recycle estimate --model gpt3-6.7b --gpu a100-80 --stages 8 --out profile.json
    recycle plan --pipelines 4 --stages 8 --microbatches 32 --profile profile.json --failures 12 --json
  micro-batches cut at layers that neighbouring stages share, with a slow worker; "kept" is the share of the fault-free throughput
    recycle plan --pipelines 4 --stages 8 --microbatches 32 --layers 32 --shared-layers 2 --costs 10,13,9 --fail W1_2 \\
      --speed W0_3=0.6 --json
  stages that an embedding and a head make uneven: cuts level them with nobody dead, and auto says how many layers that takes
    recycle plan --pipelines 4 --stages 8 --microbatches 32 --profile profile.json --shared-layers auto
  a plan for every number of failures up to a quarter of the workers; run it again to go on where it was stopped
    recycle plan --pipelines 16 --stages 16 --microbatches 64 --costs 10,13,9 --comm 1 --memory 32 \\
      --library --max-failures 25% --out plans/"""


def add_plan_parser(subparsers: Subparsers) -> None:
    summary = "make the schedule for a set of failures, or a library of them"
    description = "Make the schedule of every live worker, and say how far it is from the best possible."
    parser = add_command(subparsers, "plan", run_plan, summary, description, _EXAMPLES)
    shape = parser.add_argument_group("the cluster")
    add_shape_options(shape)
    failures = shape.add_mutually_exclusive_group()
    failures.add_argument("--fail", default="", metavar="W1_2,...", help="the dead workers, by name")
    failures.add_argument("--failures", type=int, metavar="N", help="any N dead workers: plan for where they hurt least")
    costs = parser.add_argument_group("costs and memory")
    about = "whole µs of forward, input gradient, weight gradient; fused backward is I+W"
    costs.add_argument("--costs", metavar="F,I,W", help=about)
    costs.add_argument("--comm", type=int, default=0, metavar="US", help="µs between two stages, with --costs (default: 0)")
    costs.add_argument("--profile", metavar="FILE", help="a profile instead of --costs")
    about = "micro-batches in flight (6, or one number a stage: 4,3,2,1), bytes with a profile (80GiB), or unlimited"
    costs.add_argument("--memory", metavar="LIMIT", help=f"{about} (default: the profile's device memory, or unlimited)")
    layers = parser.add_argument_group("layers and speeds")
    about = "equal layers of the model, as many in each stage; --costs stay those of a whole stage"
    layers.add_argument("--layers", type=int, metavar="N", help=about)
    about = "layers on either side of a boundary that both stages hold: there, micro-batches may be cut (default: 0)"
    about += "; auto chooses by memory and by what one dead worker leaves"
    layers.add_argument("--shared-layers", type=_shared_layers, default=0, metavar="K|auto", help=about)
    about = "workers that are slower or faster than the costs say: 0.6 is 60 %% of the speed"
    layers.add_argument("--speed", default="", metavar="W0_3=0.6,...", help=about)
    about = "the answer of a running job with this time between failures: workers or whole layers move to other stages if it pays"
    layers.add_argument("--mean-time-between-failures", type=_duration_s, metavar="30m", help=about)
    search = parser.add_argument_group("search")
    about = "which of adaptive,decoupled,staggered to use, or none (default: all)"
    search.add_argument("--techniques", default=",".join(Techniques.NAMES), metavar="LIST", help=about)
    search.add_argument("--method", choices=METHODS, default="auto", help="default: auto")
    about = f"how long to search for one plan, in counted steps (default: {DEFAULT_EFFORT:,}, in a library {LIBRARY_EFFORT:,})"
    search.add_argument("--effort", type=int, metavar="N", help=f"{about}: the same plan on every machine")
    about = "seconds for one plan (default: none); plans then depend on how fast and how busy the machine is; Ctrl-C is safe"
    search.add_argument("--time-limit", type=float, metavar="S", help=about)
    library = parser.add_argument_group("library")
    about = "plan for every number of failures from 0 up, into the folder --out"
    library.add_argument("--library", action="store_true", help=about)
    library.add_argument("--max-failures", default="25%", metavar="N|P%", help="how far up (default: 25%%)")
    library.add_argument("--jobs", type=int, metavar="N", help="processes (default: one a core)")
    parser.add_argument("--out", type=output_path, metavar="PATH", help="where the plan goes (a file), or the library (a folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a summary")


def _shared_layers(text: str) -> int | str:
    try:
        return text if text == AUTO else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of layers: give a whole number, or {AUTO}") from None


def _duration_s(text: str) -> float:
    try:
        return parse_duration_us(text) / 1e6
    except UserError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def _live_answer(problem: Problem, mean_time_s: float) -> PlanAssignment:
    """The answer of a running job to the dead workers of a problem."""
    planner = Planner(without_failures(problem), mean_time_s=mean_time_s)
    return planner.at_layers(RunLayers(problem.layer_counts)).answer(problem.cluster.failed)


def run_plan(args: argparse.Namespace) -> None:
    if args.mean_time_between_failures is not None and (args.library or args.failures is not None):
        raise UserError(
            "--mean-time-between-failures is for dead workers by name: give --fail instead of --failures or --library"
        )
    is_auto, choice = args.shared_layers == AUTO, None
    problem = describe(
        args.pipelines,
        args.stages,
        args.microbatches,
        fail=args.fail,
        costs=args.costs,
        comm=args.comm,
        profile=args.profile,
        memory=args.memory,
        techniques=args.techniques,
        layers=args.layers,
        shared_layers=0 if is_auto else args.shared_layers,
        speeds=args.speed,
    )
    if note := mismatch_note(problem.profile.taken, problem.shape.num_pipelines):
        print(note, file=sys.stderr)
    refuse_unwritable(args.out / "library.json" if args.library and args.out else args.out)
    if is_auto:
        with Console(stderr=True).status("choosing how many layers to share"):
            choice = choose_shared_layers(problem)
        problem = replace(problem, shared_layers=choice.num)
    if args.library:
        if choice is not None:
            print(choice.sentence(), file=sys.stderr)
        _run_library(args, problem)
        return
    at_most = "" if args.time_limit is None else f", at most {args.time_limit:g} s"
    with Console(stderr=True).status(f"planning by {args.method}{at_most}"):
        planned, fault_free_us = _plan_and_fault_free_us(args, problem)
    plan, distribution, answer = planned.plan, planned.distribution, planned.answer
    kept = None if fault_free_us is None else kept_throughput(plan, fault_free_us)
    if args.out:
        plan.save(args.out)
    if args.json:
        print(json.dumps(_facts(plan, distribution, kept) | _layer_facts(plan, choice) | _answer_facts(answer)))
    else:
        print(_summary(plan, distribution, kept, choice, args.out))
        if answer is not None:
            print(f"answer    {answer.reason}")


@dataclass(frozen=True, slots=True)
class _Planned:
    """The plan, the failures at each stage that it is for if only their number was given, and a running job's answer if asked."""

    plan: Plan
    distribution: Distribution | None = None
    answer: PlanAssignment | None = None


def _plan_for(args: argparse.Namespace, problem: Problem) -> _Planned:
    if args.mean_time_between_failures is not None:
        answer = _live_answer(problem, args.mean_time_between_failures)
        return _Planned(answer.plan, answer=answer)
    if args.failures is None:
        return _Planned(solve(problem, args.method, args.time_limit, _effort(args)))
    return _Planned(*solve_normalized(problem, args.failures, args.method, args.time_limit, _effort(args)))


def _plan_and_fault_free_us(args: argparse.Namespace, problem: Problem) -> tuple[_Planned, int | None]:
    """Make the plan, and the period of the fault-free plan to compare it with.

    The period is None without shared layers, speeds and a running job: then nothing is compared.
    """
    if not (problem.shared_layers or problem.speeds or args.mean_time_between_failures is not None):
        return _plan_for(args, problem), None
    how = problem, args.method, args.time_limit, _effort(args)
    is_other = args.failures or problem != fault_free_problem(problem)
    if not is_other or 3 * problem.shape.num_stages * problem.shape.num_chains < _LARGE_OPS:
        planned = _plan_for(args, problem)
        return planned, fault_free_period_us(*how) if is_other else planned.plan.period_us
    with process_pool(1) as pool:
        fault_free_us = submit(pool, fault_free_period_us, *how)
        return _plan_for(args, problem), fault_free_us.result()


def _effort(args: argparse.Namespace) -> int:
    if args.effort is None:
        return LIBRARY_EFFORT if args.library else DEFAULT_EFFORT
    if args.effort < 1:
        raise UserError(f"--effort is {args.effort}, but a search takes at least 1 step")
    return int(args.effort)


def _facts(plan: Plan, distribution: Distribution | None, kept: KeptThroughput | None) -> dict[str, Any]:
    """The fields of --json; times in µs."""
    facts: dict[str, Any] = {
        "period": plan.period_us,
        "makespan": makespan_us(plan),
        "bound": plan.quality.bound_us,
        "status": plan.quality.status,
        "method": plan.quality.method,
        "seconds": plan.quality.seconds,
        "num_ops": plan.num_ops,
        "peak_in_flight": peak_in_flight(plan),
    }
    if kept is not None:
        facts["kept"], facts["live_share"] = round(kept.kept, 4), round(kept.live_share, 4)
        facts["fault_free_period"] = kept.fault_free_us
    if distribution is not None:
        facts["failed"] = [str(worker) for worker in sorted(plan.problem.cluster.failed)]
        facts["distribution"] = list(distribution)
        facts["bound_of_any_distribution"] = _least_bound(plan, distribution)
    return facts


def _layer_facts(plan: Plan, choice: SharedLayersChoice | None) -> dict[str, Any]:
    """The fields of --json about shared layers: their number, why it was chosen, and the memory of a worker of each stage."""
    facts: dict[str, Any] = {}
    if plan.problem.shared_layers or choice is not None:
        facts["shared_layers"] = plan.problem.shared_layers
    if choice is not None:
        facts["shared_layers_because"] = choice.sentence()
    if plan.problem.shared_layers and (fullest := _fullest(plan)):
        facts["memory"] = {
            "static": [used.static_bytes for used in fullest],
            "shared": [used.guest_bytes for used in fullest],
            "activations": [used.activation_bytes for used in fullest],
        }
    return facts


def _answer_facts(answer: PlanAssignment | None) -> dict[str, Any]:
    """The fields of --json about the answer of a running job: why, who moves, and the layers of each stage."""
    if answer is None:
        return {}
    moves = [f"{now}>{place}" for now, place in answer.moves]
    return {"because": answer.reason, "moves": moves, "layers": list(answer.plan.problem.layer_counts)}


def _fullest(plan: Plan) -> list[MemoryUse]:
    """Of each stage the memory of the worker that needs most; empty if the profile knows no bytes."""
    used = memory_use(plan)
    if not any(one.total_bytes for one in used.values()):
        return []
    of_stages = [[one for worker, one in used.items() if worker.stage == stage] for stage in range(plan.problem.shape.num_stages)]
    return [max(own, key=lambda one: one.total_bytes) for own in of_stages]


def _least_bound(plan: Plan, distribution: Distribution) -> int:
    """The least bound of any distribution of as many failures."""
    return least_bound(without_failures(plan.problem), sum(distribution))


def _summary(
    plan: Plan,
    distribution: Distribution | None,
    kept: KeptThroughput | None,
    choice: SharedLayersChoice | None,
    out: Path | None,
) -> str:
    shape, quality = plan.problem.shape, plan.quality
    failed = [str(worker) for worker in sorted(plan.problem.cluster.failed)]
    named = ", ".join(failed[:8]) + (f" and {len(failed) - 8} more" if len(failed) > 8 else "")
    over = "proven optimal" if quality.status == "optimal" else f"at most {max(plan.gap - 1, 0.0001):.2%} above the best possible"
    if distribution is not None:
        least = _least_bound(plan, distribution)
        if least < quality.bound_us:
            over += f" for these dead workers; any {len(failed)} failures: at least {format_us(least)}"
    lines = [
        f"cluster   {shape.num_pipelines} pipelines x {shape.num_stages} stages, {shape.num_microbatches} micro-batches each; "
        + (f"{len(failed)} dead: {named}" if failed else "all alive"),
        f"period    {format_us(plan.period_us)}  (bound {format_us(quality.bound_us)}: {over})",
        f"makespan  {format_us(makespan_us(plan))}  (from the first op to the last step of one iteration)",
        f"in flight {_ranges(peak_in_flight(plan))} micro-batches by stage",
        f"made by   {quality.method} in {quality.seconds:.2f} s, {plan.num_ops:,} ops",
    ]
    if plan.problem.shared_layers:
        lines.insert(4, f"memory    {_memory_text(plan)}")
    if kept is not None:
        lines.insert(2, _kept_line(plan, kept))
    if choice is not None:
        lines.insert(1, f"layers    {choice.sentence()}")
    if distribution is not None:
        lines.insert(1, f"failures  {_ranges(list(distribution))} by stage")
    if out:
        lines.append(f"written   {out}  (recycle show {out})")
    return "\n".join(lines)


def _kept_line(plan: Plan, kept: KeptThroughput) -> str:
    cuts = f"; {cut_share(plan):.0%} of cuts lie elsewhere than at the base" if plan.cuts else ""
    return (
        f"kept      {kept.kept:.1%} of the fault-free throughput (period {format_us(kept.fault_free_us)}); "
        f"{kept.live_share:.1%} of the workers' speed is alive{cuts}"
    )


def _memory_text(plan: Plan) -> str:
    """Say how many layers workers hold, and what that takes if the profile knows bytes."""
    held = plan.problem.held_layers
    assert held is not None
    text = f"workers hold {_ranges(list(map(len, held.ranges)))} layers by stage, {_ranges(_num_own(plan))} of them their own"
    if not (fullest := _fullest(plan)):
        return text
    stage, most = max(enumerate(fullest), key=lambda item: item[1].total_bytes)
    return (
        f"{text}; stage {stage} needs most, {format_bytes(most.total_bytes)} a worker: {format_bytes(most.own_bytes)} of state, "
        f"{format_bytes(most.guest_bytes)} more for shared layers, {format_bytes(most.activation_bytes)} of activations"
    )


def _num_own(plan: Plan) -> list[int]:
    return [len(layers) for layers in plan.problem.profile.layers]


def _ranges(values: list[int]) -> str:
    """Return a list of numbers, a long one with its runs shortened: four times 2, then 1, is `2 (4 times), 1`."""
    if len(values) <= 16:
        return ",".join(map(str, values))
    runs = [(value, len(list(run))) for value, run in groupby(values)]
    return ", ".join(f"{value} ({count} times)" if count > 1 else str(value) for value, count in runs)


def _run_library(args: argparse.Namespace, problem: Problem) -> None:
    if args.fail or args.failures is not None:
        raise UserError("a library is for every number of failures: leave --fail and --failures out, and give --max-failures")
    if args.out is None:
        raise UserError("a library needs a folder: give --out, such as --out plans/")
    if args.jobs is not None and args.jobs < 1:
        raise UserError(f"--jobs is {args.jobs}, but at least 1 process must plan")
    refuse_unwritable(args.out / "library.json")
    most = min(parse_share_or_count(args.max_failures, problem.shape.num_workers), most_failures(problem.shape))
    began, built = time.monotonic(), []
    with progress_bar(TimeRemainingColumn()) as progress:
        task = progress.add_task("planning", total=most + 1)
        for plan in build(args.out, problem, most, args.method, args.time_limit, args.jobs, _effort(args)):
            built.append(plan)
            progress.update(task, advance=1, description=f"{plan.num_failures} failures")
    built.sort(key=lambda plan: plan.num_failures)
    seconds = round(time.monotonic() - began, 3)
    plans = [{"failures": b.num_failures, "period": b.period_us, "bound": b.bound_us, "kept": b.was_there} for b in built]
    facts = {"folder": str(args.out), "seconds": seconds, "plans": plans}
    print(json.dumps(facts) if args.json else _library_summary(args.out, built, seconds))


def _library_summary(folder: Path, built: list[Built], seconds: float) -> str:
    kept = sum(plan.was_there for plan in built)
    worst = max(built, key=lambda plan: plan.period_us / plan.bound_us)
    lines = [f"{'failures':>8} {'period':>12} {'vs none':>9} {'over bound':>11}"]
    shown = built if len(built) <= 20 else [plan for plan in built if plan.num_failures % (len(built) // 16) == 0]
    for plan in shown:
        slower, over = plan.period_us / built[0].period_us, plan.period_us / plan.bound_us - 1
        lines.append(f"{plan.num_failures:>8} {format_us(plan.period_us):>12} {slower:>9.3f} {over:>11.2%}")
    lines.append(
        f"{len(built)} plans in {folder} ({kept} were there), {seconds:.1f} s; "
        f"none more than {worst.period_us / worst.bound_us - 1:.2%} above the best possible"
    )
    return "\n".join(lines)
