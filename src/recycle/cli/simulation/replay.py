"""`recycle replay`: simulate a plan for some iterations; print periods, time shares, memory and the critical path."""

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from recycle.cli.arguments import Subparsers, add_command, add_file_options, add_rows_option
from recycle.cli.simulation.replay_text import replay_facts, replay_subtitle, replay_summary
from recycle.cli.terminal import Terminal, chart_width, print_lines, progress_bar
from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.events.record import OpRan, Started
from recycle.core.events.record_file import write_record
from recycle.core.files import refuse_unwritable, write_bytes, write_text
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import check
from recycle.report.export.perfetto import draw_run_trace
from recycle.report.render.svg import draw_svg
from recycle.report.render.terminal_chart import MOST_WORKERS, draw_chart, select_workers
from recycle.report.timeline.run_timeline import run_timeline
from recycle.report.timeline.timeline import Timeline
from recycle.sim.replay.replay import Conditions, replay
from recycle.sim.replay.replay_result import ReplayResult
from recycle.sim.replay.time_shares import stage_intervals_us, with_unlimited_memory

_MOST_TRACED = 300_000  # ops in a Perfetto trace of all iterations
_DESCRIPTION = """\
Simulate a plan for several iterations in a row, op by op: an independent check of its period.

Without noise a legal plan takes exactly its period. --jitter, --slow and --contention show how robust the plan is.
No op starts before its planned start, unless --eager: then the order of each row alone decides, as in a real run."""
_EXAMPLES = """\
examples:
  recycle replay plan.json                            five iterations: period, bubbles, memory, critical path
  recycle replay plan.json --jitter 5% --seed 7       every op a little shorter or longer
  recycle replay plan.json --slow W0_1=1.3,W2_0=2     slow workers
  recycle replay plan.json --contention --eager       messages of a worker one after another; as in a real run
  recycle replay plan.json --perfetto trace.json      then open it at https://ui.perfetto.dev
  recycle replay plan.json --json | jq .critical_path.by_kind"""


def add_replay_parser(subparsers: Subparsers) -> None:
    summary = "simulate a plan for some iterations, exactly or with noise"
    parser = add_command(subparsers, "replay", run_replay, summary, _DESCRIPTION, _EXAMPLES)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="the plan file")
    parser.add_argument("--iterations", type=int, default=5, metavar="N", help="how many in a row (default: 5)")
    noise = parser.add_argument_group("noise")
    noise.add_argument("--jitter", default="0%", metavar="J%", help="standard deviation of an op's duration (default: 0%%)")
    noise.add_argument("--slow", default="", metavar="W0_1=1.3,...", help="workers whose ops take so many times as long")
    noise.add_argument("--contention", action="store_true", help="one link out and one in for each worker: messages wait")
    noise.add_argument("--seed", type=int, default=1, metavar="N", help="of the jitter (default: 1)")
    parser.add_argument("--eager", action="store_true", help="start ops as soon as they can, not when the plan says")
    files = parser.add_argument_group("output")
    add_file_options(
        files,
        record="write every op that ran, as JSON lines",
        svg="write an SVG picture of a steady iteration",
        png="write a PNG picture of it",
        perfetto="write a trace for ui.perfetto.dev, with memory; of big plans 3 iterations",
    )
    add_rows_option(files)
    files.add_argument("--json", action="store_true", help="print one JSON object instead of a summary and a chart")


def run_replay(args: argparse.Namespace) -> None:
    conditions = Conditions(
        num_iterations=args.iterations,
        jitter=parse_jitter(args.jitter),
        slow=parse_slow(args.slow),
        contention=args.contention,
        eager=args.eager,
        seed=args.seed,
    )
    refuse_unwritable(args.record, args.svg, args.png, args.perfetto)
    plan = Plan.load(args.plan)
    if broken := check(plan):
        raise UserError(
            f"{args.plan} is not a legal plan, so it cannot be replayed ({broken[0]}); recycle check {args.plan} lists "
            f"{'all ' if len(broken) > 1 else ''}{len(broken)} violation{'s' if len(broken) > 1 else ''}"
        )
    result, eager = _replay(plan, conditions)
    written = _write_files(args, result)
    if args.json:
        print(json.dumps(replay_facts(result, eager, conditions), ensure_ascii=False))
        return
    print("\n".join(replay_summary(result, eager, conditions)) + "\n")
    console, all_rows = Terminal(), args.rows == "all"
    workers = None if all_rows else set(select_workers(plan.problem.cluster, MOST_WORKERS))
    timeline = _steady_timeline(result, result.events([result.steady_iteration], workers))
    print_lines(draw_chart(timeline, chart_width(console), all_rows), console)
    for path in written:
        print(f"wrote {path}")


def parse_jitter(text: str) -> float:
    """Return the share that `5%` or `0.05` stands for."""
    body = text.strip()
    try:
        return float(body[:-1]) / 100 if body.endswith("%") else float(body)
    except ValueError:
        raise UserError(f"a jitter of {text!r} cannot be replayed: write a share such as 5%, from 0% to 100%") from None


def parse_slow(text: str) -> dict[Worker, float]:
    """Return the factors in `W0_1=1.3,W2_0=2`."""
    slow: dict[Worker, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, factor = part.partition("=")
        worker = Worker.parse(name)
        if worker in slow:
            raise UserError(f"{worker} is named as slow twice: name each worker once")
        try:
            slow[worker] = float(factor)
        except ValueError:
            raise UserError(
                f"{part!r} does not say how slow a worker is: write a worker and a factor, such as W0_1=1.3"
            ) from None
    return slow


def _replay(plan: Plan, conditions: Conditions) -> tuple[ReplayResult, ReplayResult]:
    """Replay as asked, and eagerly under the same conditions."""
    runs = [conditions] if conditions.eager else [conditions, replace(conditions, eager=True)]
    with progress_bar() as bar:
        task = bar.add_task("replaying ops", total=len(runs) * conditions.num_iterations * plan.num_ops)
        results = [replay(plan, chosen, lambda num: bar.advance(task, num)) for chosen in runs]
    return results[0], results[-1]


def _write_files(args: argparse.Namespace, result: ReplayResult) -> list[Path]:
    if args.record:
        write_record(args.record, [Started("replay", args.plan.name), *result.events()])
    if args.svg or args.png:
        timeline = _steady_timeline(result, result.events(_around_steady(result)))
        if args.svg:
            write_text(args.svg, draw_svg(timeline))
        if args.png:
            from recycle.report.render.png import draw_png  # matplotlib takes half a second to import

            write_bytes(args.png, draw_png(timeline))
    if args.perfetto:
        is_big = result.graph.num_ops * result.num_iterations > _MOST_TRACED
        traced = result.events(_around_steady(result) if is_big else None)
        write_text(args.perfetto, draw_run_trace(with_unlimited_memory(result.problem), traced))
    return [path for path in (args.record, args.svg, args.png, args.perfetto) if path]


def _around_steady(result: ReplayResult) -> list[int]:
    middle = result.steady_iteration
    return [number for number in (middle - 1, middle, middle + 1) if 0 <= number < result.num_iterations]


def _steady_timeline(result: ReplayResult, events: Iterable[OpRan]) -> Timeline:
    intervals = tuple((first, last) for first, last in stage_intervals_us(result)[result.steady_iteration].tolist())
    return run_timeline(result.problem, events, result.steady_iteration, replay_subtitle(result), intervals)
