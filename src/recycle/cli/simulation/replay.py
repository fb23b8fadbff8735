"""`recycle replay`: play a plan for some iterations, and say how long they take, where time goes, and what decides it."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from recycle.cli.simulation.replay_text import facts, rating, summary
from recycle.cli.terminal import Terminal, chart_width, print_lines
from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.events.record import write_record
from recycle.core.files import refuse_unwritable, write_bytes, write_text
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import check
from recycle.report.export.perfetto import draw_run_trace
from recycle.report.render.svg import draw_svg
from recycle.report.render.terminal_chart import MOST_WORKERS, draw_chart, select_workers
from recycle.report.timeline.run_timeline import run_timeline
from recycle.report.timeline.timeline import Timeline
from recycle.sim.replay.replay import Conditions, replay
from recycle.sim.replay.replay_result import Replay
from recycle.sim.replay.time_shares import counted, windows_us

_LONG = 300_000  # ops: from here on it takes more than a second
_MOST_TRACED = 300_000  # ops in a trace: beyond, the viewer and the disk ask for less
_DESCRIPTION = """\
Play a plan for several iterations in a row, event by event: an independent check of what it promises.

Without noise a legal plan takes exactly its period. With --jitter, --slow or --contention it shows how robust the plan is.
No op starts before the plan says so, unless --eager: then the order of each row alone drives, as in a real run."""
_EXAMPLES = """\
examples:
  recycle replay plan.json                            five iterations: period, bubbles, memory, critical path
  recycle replay plan.json --jitter 5% --seed 7       every op a little shorter or longer
  recycle replay plan.json --slow W0_1=1.3,W2_0=2     slow workers
  recycle replay plan.json --contention --eager       messages of a worker one after another; rows alone drive
  recycle replay plan.json --perfetto trace.json      then open it at https://ui.perfetto.dev
  recycle replay plan.json --json | jq .critical_path.by_kind"""


def add_replay_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    parser = subparsers.add_parser(
        "replay",
        help="play a plan for some iterations, exactly or with noise",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("plan", type=Path, metavar="PLAN", help="the plan file")
    parser.add_argument("--iterations", type=int, default=5, metavar="N", help="how many in a row (default: 5)")
    noise = parser.add_argument_group("noise")
    noise.add_argument("--jitter", default="0%", metavar="J%", help="standard deviation of an op's duration (default: 0%%)")
    noise.add_argument("--slow", default="", metavar="W0_1=1.3,...", help="workers whose ops take so many times as long")
    noise.add_argument("--contention", action="store_true", help="one link out and one in for each worker: messages wait")
    noise.add_argument("--seed", type=int, default=1, metavar="N", help="of the jitter (default: 1)")
    parser.add_argument("--eager", action="store_true", help="start ops as soon as they can, not when the plan says")
    files = parser.add_argument_group("output")
    files.add_argument("--record", type=Path, metavar="FILE", help="write every op that ran, as JSON lines")
    files.add_argument("--svg", type=Path, metavar="FILE", help="write an SVG picture of a steady iteration")
    files.add_argument("--png", type=Path, metavar="FILE", help="write a PNG picture of it")
    files.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev, with memory; of big plans 3 iterations"
    )
    files.add_argument(
        "--rows", choices=("auto", "all"), default="auto", help="auto leaves workers of big plans out of the chart"
    )
    files.add_argument("--json", action="store_true", help="print one JSON object instead of a summary and a chart")
    parser.set_defaults(run=run_replay)


def run_replay(args: argparse.Namespace) -> int:
    conditions = Conditions(
        num_iterations=args.iterations,
        jitter=parse_jitter(args.jitter),
        slow=parse_slow(args.slow),
        contention=args.contention,
        eager=args.eager,
        seed=args.seed,
    )
    for path in (args.record, args.svg, args.png, args.perfetto):
        if path:
            refuse_unwritable(path)
    plan = Plan.load(args.plan)
    if broken := check(plan):
        raise UserError(
            f"{args.plan} is not a legal plan, so there is nothing to play ({broken[0]}); recycle check {args.plan} lists "
            f"{'all ' if len(broken) > 1 else ''}{len(broken)} violation{'s' if len(broken) > 1 else ''}"
        )
    played, eager = _play(plan, conditions)
    written = _write_files(args, played)
    if args.json:
        print(json.dumps(facts(played, eager, conditions), ensure_ascii=False))
        return 0
    print("\n".join(summary(played, eager, conditions)) + "\n")
    console = Terminal()
    print_lines(draw_chart(_chart_timeline(played, args.rows == "all"), chart_width(console), args.rows == "all"), console)
    for path in written:
        print(f"wrote {path}")
    return 0


def parse_jitter(text: str) -> float:
    """Return the share that `5%` or `0.05` stands for."""
    body = text.strip()
    try:
        return float(body[:-1]) / 100 if body.endswith("%") else float(body)
    except ValueError:
        raise UserError(f"a jitter of {text!r} cannot be played: write a share such as 5%, from 0% to 100%") from None


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


def _play(plan: Plan, conditions: Conditions) -> tuple[Replay, Replay]:
    """Play as asked, and eagerly under the same conditions; a bar on stderr shows how far a long replay is."""
    runs = [conditions] if conditions.eager else [conditions, conditions.eagerly()]
    total = len(runs) * conditions.num_iterations * plan.num_ops
    columns = TextColumn("{task.description:>14}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(file=sys.stderr), transient=True, disable=total < _LONG) as bar:
        task = bar.add_task("playing", total=total)
        played = [replay(plan, chosen, lambda num: bar.advance(task, num)) for chosen in runs]
    return played[0], played[-1]


def _write_files(args: argparse.Namespace, played: Replay) -> list[Path]:
    if args.record:
        write_record(args.record, [played.started(args.plan.name), *played.events()])
    if args.svg or args.png:
        timeline = _picture_timeline(played)
        if args.svg:
            write_text(args.svg, draw_svg(timeline))
        if args.png:
            from recycle.report.render.png import draw_png  # matplotlib takes half a second to import, and only this needs it

            write_bytes(args.png, draw_png(timeline))
    if args.perfetto:
        is_big = played.program.num_ops * played.num_iterations > _MOST_TRACED
        traced = played.events(_around_steady(played) if is_big else None)
        write_text(args.perfetto, draw_run_trace(counted(played.problem), traced))
    return [path for path in (args.record, args.svg, args.png, args.perfetto) if path]


def _around_steady(played: Replay) -> list[int]:
    middle = played.steady_iteration
    return [number for number in (middle - 1, middle, middle + 1) if 0 <= number < played.num_iterations]


def _picture_timeline(played: Replay) -> Timeline:
    """The steady iteration of all workers, with those before and after it."""
    events = played.events(_around_steady(played))
    return run_timeline(played.problem, events, played.steady_iteration, rating(played), _windows(played))


def _chart_timeline(played: Replay, all_rows: bool) -> Timeline:
    """The steady iteration of the workers that the chart shows."""
    workers = None if all_rows else set(select_workers(played.problem.cluster, MOST_WORKERS))
    events = played.events([played.steady_iteration], workers)
    return run_timeline(played.problem, events, played.steady_iteration, rating(played), _windows(played))


def _windows(played: Replay) -> tuple[tuple[int, int], ...]:
    return tuple((first, last) for first, last in windows_us(played)[played.steady_iteration].tolist())
