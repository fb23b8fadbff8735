"""`recycle report`: how a run went, beside the plan it was run by."""

import argparse
import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from recycle.cli.measuring.report_text import executed_rating, planned_title, report_lines
from recycle.cli.terminal import Terminal, chart_width, print_lines
from recycle.core.cluster import Worker
from recycle.core.errors import FileProblem, UserError
from recycle.core.events.record import PLAN, PLANS, RECORD, SUMMARY, later_plans, read_record
from recycle.core.files import refuse_other_suffix, refuse_unwritable, write_bytes, write_text
from recycle.evaluate.against_simulation.epoch_comparison import Comparison
from recycle.evaluate.against_simulation.run_plans import Plans, load_plan, summarize
from recycle.report.export.perfetto import draw_run_trace
from recycle.report.record.run_columns import read_run_record
from recycle.report.record.run_summary import Summary
from recycle.report.render.svg import draw_svg
from recycle.report.render.terminal_chart import MOST_WORKERS, PLAIN, Cell, draw_chart, select_workers
from recycle.report.timeline.plan_timeline import plan_timeline
from recycle.report.timeline.run_timeline import run_timeline
from recycle.report.timeline.timeline import Timeline
from recycle.sim.replay.time_shares import with_unlimited_memory

_LONG_BYTES = 5_000_000  # of a record: from here on reading takes about a second
_MOST_TRACED = 300_000  # ops in a trace: beyond, the viewer and the disk ask for less
_DESCRIPTION = """\
Show how a run went: steps and losses, speed beside what the plan promises, bubbles, recoveries, memory, checkpoints and warnings;
then one iteration as it was executed, and below it the same as it was planned, by the plan of the epoch that it was run in.

RUN is a folder that 'recycle train --out' wrote, of a run that ended or was cut off; or a record with its plan, such as
'recycle replay --record' writes. The first iteration, in which everything warms up, is not counted."""
_EXAMPLES = """\
examples:
  recycle report runs/a                            numbers, a curve of the loss, an iteration as executed and as planned
  recycle report runs/a --png page.png             the same as a picture on one page
  recycle report runs/a --iteration 17             that iteration, not the one of median length
  recycle report runs/a --perfetto trace.json      then open it at https://ui.perfetto.dev
  recycle report runs/a --against-simulation       the same failures through the simulator: iterations and pauses beside these
  recycle report replayed.jsonl --plan plan.json   a record by itself
  recycle report runs/a --json | jq .plan.over_promise"""


def add_report_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    parser = subparsers.add_parser(
        "report",
        help="show how a run went, beside its plan",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_path", type=Path, metavar="RUN", help="the folder of a run, or a record")
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help=f"a plan of the run (default: {PLAN} beside the record, and {PLANS}/)"
    )
    parser.add_argument("--iteration", type=int, metavar="N", help="the iteration to draw (default: one of median length)")
    simulation = parser.add_argument_group("simulation")
    simulation.add_argument(
        "--against-simulation",
        action="store_true",
        help="predict the run, its failures included, and hold what it took against it",
    )
    simulation.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a simulated pause, such as recycle.detect=50ms"
    )
    files = parser.add_argument_group("output")
    files.add_argument("--png", type=Path, metavar="FILE", help="write everything as a picture on one page")
    files.add_argument("--svg", type=Path, metavar="FILE", help="write an SVG picture of the iteration as executed")
    files.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev, with memory; of long runs 3 iterations"
    )
    files.add_argument(
        "--rows", choices=("auto", "all"), default="auto", help="auto leaves workers of big plans out of the charts"
    )
    files.add_argument("--json", action="store_true", help="print one JSON object instead of numbers and charts")
    parser.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    for path in (args.png, args.svg, args.perfetto):
        if path:
            refuse_unwritable(path)
    if args.png:
        refuse_other_suffix(args.png, ".png")
    if args.set and not args.against_simulation:
        raise UserError("--set is for a simulation: give --against-simulation, too")
    files = find_files(args.run_path, args.plan)
    summary, plan_path = _read(files, args.iteration)
    iteration = summary.executed.middle if args.iteration is None else args.iteration
    summary.executed.windows(iteration)  # refused before anything is written
    compared = _compared(args, files, summary)
    written = _write_files(args, summary, iteration)
    if args.json:
        facts = {**summary.to_json(), "ended": _has_ended(files, summary), "weights_sha256": _digest(files)}
        facts |= {"against_simulation": compared.to_json()} if compared else {}
        print(json.dumps({**facts, "drawn_iteration": iteration, "plan_file": str(plan_path)}, ensure_ascii=False))
        return 0
    console = Terminal()
    width = chart_width(console)
    texts = report_lines(summary, _state(files, summary), width)
    if console.options.ascii_only:
        texts = [_plain(text) for text in texts]
    print_lines([(Cell(text, PLAIN),) for text in (*texts, "")], console)
    for drawn in (_executed(summary, iteration, args.rows), _planned(summary)):
        print_lines([*draw_chart(drawn, width, args.rows == "all"), ()], console)
    print_lines([(Cell(text, PLAIN),) for text in compared.lines()] if compared else [], console)
    for path in written:
        print(f"wrote {path}")
    return 0


@dataclass(frozen=True, slots=True)
class Files:
    """Where the parts of a run lie, and what its summary says; None while there is none."""

    record: Path
    plans: Plans
    summary: dict[str, Any] | None
    is_folder: bool


def find_files(path: Path, plan: Path | None) -> Files:
    """Return the files of a run that is named by its folder or by its record."""
    try:
        is_folder = path.is_dir()
        if not path.exists():
            raise FileProblem(f"cannot read {path}: there is no such folder or file; give the folder of a run, or a record")
    except OSError as problem:
        raise FileProblem(f"cannot read {path}: {problem.strerror or problem}") from None
    record = path / RECORD if is_folder else path
    if not record.exists():
        raise FileProblem(f"{path} is not the folder of a run: it has no {RECORD}; give one that 'recycle train --out' wrote")
    plans = Plans(plan) if plan else Plans(record.parent / PLAN, later_plans(record.parent))
    if not plans.first.exists():
        raise FileProblem(f"cannot read the plan of this run: there is no {plans.first}; give its plan with --plan FILE")
    return Files(record, plans, _read_summary(record.parent / SUMMARY) if is_folder else None, is_folder)


def _read_summary(path: Path) -> dict[str, Any] | None:
    """Return what a run wrote at its end; None of one that was cut off."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as problem:
        raise FileProblem(f"cannot read {path} ({problem}): remove it, and the report does without") from None
    return data if isinstance(data, dict) else {}


def _read(files: Files, iteration: int | None) -> tuple[Summary, Path]:
    """Return the run beside the plan that it is shown with, and where that lies."""
    load_plan(files.plans.first)  # refused before a long record is read
    console = Console(stderr=True)
    is_long = console.is_terminal and files.record.stat().st_size > _LONG_BYTES
    with console.status("reading the record") if is_long else nullcontext():
        try:
            return summarize(read_run_record(read_record(files.record)), files.plans, iteration)
        except FileProblem:
            raise  # it names the file
        except UserError as problem:
            raise type(problem)(f"{files.record}: {problem}") from None


def _compared(args: argparse.Namespace, files: Files, summary: Summary) -> Comparison | None:
    """The run beside a simulation of it, if that was asked for."""
    if not args.against_simulation:
        return None
    from recycle.evaluate.against_simulation.simulated_epochs import (  # only this needs the planner
        against_simulation,
        read_constants,
    )

    return against_simulation(summary.run, load_plan(files.plans.first), read_constants(args.set))


def _has_ended(files: Files, summary: Summary) -> bool:
    """A summary says so, unless it is that of a shorter run which was gone on with."""
    if files.summary is None:
        return False
    num_steps = files.summary.get("steps")
    return not (isinstance(num_steps, int) and summary.steps and num_steps <= summary.steps[-1].iteration)


def _state(files: Files, summary: Summary) -> str:
    if _has_ended(files, summary):
        digest = _digest(files)
        return f"to its end; weights sha256 {digest}" if digest else "to its end"
    if not files.is_folder:
        return f"from {files.record}"
    why = f"there is no {SUMMARY}" if files.summary is None else f"{SUMMARY} is from before it was resumed"
    return f"which goes on or was cut off: {why}"


def _digest(files: Files) -> str | None:
    digest = (files.summary or {}).get("weights_sha256")
    return str(digest) if digest else None


def _plain(text: str) -> str:
    """The dots of the curve as stars, for a terminal that knows ASCII only."""
    return "".join("*" if "\u2800" <= letter <= "\u28ff" else letter for letter in text).replace("│", "|")


def _around(iteration: int) -> list[int]:
    return [iteration - 1, iteration, iteration + 1]


def _executed(summary: Summary, iteration: int, rows: str) -> Timeline:
    """The iteration as it went: of all workers, or of those that the chart shows."""
    problem, windows = summary.plan.problem, summary.executed.windows(iteration)
    workers: set[Worker] | None = None if rows == "all" else set(select_workers(problem.cluster, MOST_WORKERS))
    events = summary.run.ops.events(_around(iteration), workers)
    timeline = run_timeline(problem, events, iteration, executed_rating(summary, iteration), windows)
    return replace(timeline, about=(f"iteration {iteration} as executed", *timeline.about))


def _planned(summary: Summary) -> Timeline:
    return replace(plan_timeline(summary.plan), about=planned_title(summary))


def _write_files(args: argparse.Namespace, summary: Summary, iteration: int) -> list[Path]:
    if args.png:
        from recycle.report.figures.run_page import draw_page  # matplotlib takes half a second to import, and only this needs it

        write_bytes(args.png, draw_page(summary, _executed(summary, iteration, "all"), _planned(summary)))
    if args.svg:
        write_text(args.svg, draw_svg(_executed(summary, iteration, "all")))
    if args.perfetto:
        ran, is_long = summary.executed, len(summary.run.ops) > _MOST_TRACED
        traced = summary.run.ops.events(_around(iteration) if is_long else [*ran.whole, *ran.elsewhere])
        recoveries = () if is_long else summary.recoveries
        write_text(args.perfetto, draw_run_trace(with_unlimited_memory(summary.plan.problem), traced, recoveries))
    return [path for path in (args.png, args.svg, args.perfetto) if path]
