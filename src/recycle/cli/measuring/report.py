"""`recycle report`: show the record of a run beside the plan that it was executed by."""

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from recycle.cli import arguments
from recycle.cli.measuring.report_text import report_lines
from recycle.cli.terminal import Terminal, chart_width, print_lines
from recycle.core.errors import FileProblem, UserError
from recycle.core.events.record_file import PLAN, PLANS, read_record
from recycle.core.files import refuse_other_suffix, refuse_unwritable, write_bytes, write_text
from recycle.report.export.perfetto import draw_run_trace
from recycle.report.figures.executed_beside_planned import executed_timeline, planned_timeline
from recycle.report.record.run_columns import read_run_record
from recycle.report.record.run_files import RunFiles, load_legal_plan, summarize
from recycle.report.record.run_summary import Summary
from recycle.report.render.svg import draw_svg
from recycle.report.render.terminal_chart import MOST_WORKERS, PLAIN, Cell, draw_chart, select_workers
from recycle.sim.replay.time_shares import with_unlimited_memory

_LONG_BYTES = 5_000_000  # a record of this size takes about a second to read
_MOST_TRACED = 300_000  # ops in a trace: more are too much for the viewer
_DESCRIPTION = """\
Show the results of a run: steps and losses, speed beside the plan's prediction, bubbles, recoveries, memory, checkpoints and
warnings; then one iteration as executed, and below it the same iteration as planned, by the plan of its epoch.

RUN is a folder that 'recycle train --out' wrote, of a run that ended or was cut off; or a record with its plan, such as
'recycle replay --record' writes. The first iteration is a warm-up and is not counted."""
_EXAMPLES = """\
examples:
  recycle report runs/a                            numbers, a curve of the loss, an iteration as executed and as planned
  recycle report runs/a --png page.png             the same as a picture on one page
  recycle report runs/a --iteration 17             that iteration, not the one of median length
  recycle report runs/a --perfetto trace.json      then open it at https://ui.perfetto.dev
  recycle report runs/a --against-simulation       iterations and pauses beside a simulation of the same failures
  recycle report replayed.jsonl --plan plan.json   a record by itself
  recycle report runs/a --json | jq .plan.over_promise"""


def add_report_parser(subparsers: arguments.Subparsers) -> None:
    summary = "show the results of a run, beside its plan"
    parser = arguments.add_command(subparsers, "report", run_report, summary, _DESCRIPTION, _EXAMPLES)
    parser.add_argument("run_path", type=Path, metavar="RUN", help="the folder of a run, or a record")
    arguments.add_file_options(parser, plan=f"a plan of the run (default: {PLAN} beside the record, and {PLANS}/)")
    parser.add_argument("--iteration", type=int, metavar="N", help="the iteration to draw (default: one of median length)")
    simulation = parser.add_argument_group("simulation")
    about = "simulate the run with its failures, and compare the times"
    simulation.add_argument("--against-simulation", action="store_true", help=about)
    arguments.add_set_option(simulation, "a simulated pause, such as recycle.detect=50ms")
    files = parser.add_argument_group("output")
    arguments.add_file_options(
        files,
        png="write everything as a picture on one page",
        svg="write an SVG picture of the iteration as executed",
        perfetto="write a trace for ui.perfetto.dev, with memory; of long runs 3 iterations",
    )
    arguments.add_rows_option(files)
    files.add_argument("--json", action="store_true", help="print one JSON object instead of numbers and charts")


def run_report(args: argparse.Namespace) -> None:
    refuse_unwritable(args.png, args.svg, args.perfetto)
    if args.png:
        refuse_other_suffix(args.png, ".png")
    if args.set and not args.against_simulation:
        raise UserError("--set is for a simulation: give --against-simulation, too")
    files = RunFiles.find(args.run_path, args.plan)
    summary, plan_path = _read(files, args.iteration)
    iteration = summary.executed.middle if args.iteration is None else args.iteration
    summary.executed.windows(iteration)  # raises before any file is written
    compared = None
    if args.against_simulation:
        from recycle.evaluate.against_simulation import simulated_epochs  # only this needs the planner

        constants = simulated_epochs.read_constants(args.set)
        compared = simulated_epochs.against_simulation(summary.run, load_legal_plan(files.first_plan), constants)
    written = _write_files(args, summary, iteration)
    if summary.gaps:
        print(f"recycle report: warning: {summary.gaps_text}", file=sys.stderr)
    if args.json:
        facts = {**summary.to_json(), "ended": files.has_ended(summary.run), "weights_sha256": files.weights_sha256}
        facts |= {"against_simulation": compared.to_json()} if compared else {}
        print(json.dumps({**facts, "drawn_iteration": iteration, "plan_file": str(plan_path)}, ensure_ascii=False))
        return
    console = Terminal()
    width = chart_width(console)
    texts = report_lines(summary, files.state_text(summary.run), width)
    print_lines([(Cell(text, PLAIN),) for text in (*texts, "")], console)
    shown = None if args.rows == "all" else select_workers(summary.plan.problem.cluster, MOST_WORKERS)
    for drawn in (executed_timeline(summary, iteration, shown), planned_timeline(summary)):
        print_lines([*draw_chart(drawn, width, args.rows == "all"), ()], console)
    print_lines([(Cell(text, PLAIN),) for text in compared.lines()] if compared else [], console)
    for path in written:
        print(f"wrote {path}")


def _read(files: RunFiles, iteration: int | None) -> tuple[Summary, Path]:
    """Return the run beside the plan that it is shown with, and the file of that plan."""
    load_legal_plan(files.first_plan)  # an illegal plan is refused before a long record is read
    console = Console(stderr=True)
    is_long = console.is_terminal and files.record.stat().st_size > _LONG_BYTES
    with console.status("reading the record") if is_long else nullcontext():
        try:
            gaps: list[str] = []
            return summarize(read_run_record(read_record(files.record, gaps=gaps)), files, iteration, gaps)
        except FileProblem:
            raise  # it names the file
        except UserError as problem:
            raise type(problem)(f"{files.record}: {problem}") from None


def _write_files(args: argparse.Namespace, summary: Summary, iteration: int) -> list[Path]:
    if args.png:
        from recycle.report.figures.run_page import draw_page  # matplotlib takes half a second to import, and only this needs it

        write_bytes(args.png, draw_page(summary, executed_timeline(summary, iteration), planned_timeline(summary)))
    if args.svg:
        write_text(args.svg, draw_svg(executed_timeline(summary, iteration)))
    if args.perfetto:
        executed, is_long = summary.executed, len(summary.run.ops) > _MOST_TRACED
        around = range(iteration - 1, iteration + 2)
        traced = summary.run.ops.events(around if is_long else [*executed.whole, *executed.of_other_plans])
        recoveries = () if is_long else summary.run.recoveries
        write_text(args.perfetto, draw_run_trace(with_unlimited_memory(summary.plan.problem), traced, recoveries))
    return [path for path in (args.png, args.svg, args.perfetto) if path]
