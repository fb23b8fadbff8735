"""`recycle show`: draw a plan as a chart in the terminal, and write it as SVG, PNG, Perfetto trace or CSV."""

import argparse
import sys
from pathlib import Path

from recycle.cli.arguments import Subparsers, add_command, add_file_options, add_rows_option, add_width_option
from recycle.cli.terminal import Terminal, chosen_width, print_lines
from recycle.core.errors import UserError
from recycle.core.files import write_bytes, write_text
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import names_of
from recycle.core.plans.rules import check
from recycle.core.problem import Problem, Techniques
from recycle.core.profile import Profile
from recycle.report.export.perfetto import draw_trace
from recycle.report.export.torch_csv import draw_torch_csv
from recycle.report.render.svg import draw_svg
from recycle.report.render.terminal_chart import draw_chart
from recycle.report.timeline.plan_cuts import draw_cuts
from recycle.report.timeline.plan_timeline import plan_timeline

_DESCRIPTION = """\
Draw a plan: one line for each worker, with its ops to scale.

F forward, B whole backward, I gradient of the input, W gradient of the weights; lower case where the
micro-batch belongs to another pipeline and was re-routed; dots are bubbles, bars the ends of an iteration.
If micro-batches are cut at shared layers, +1 is an op with one layer more than its stage's own, and a table
below the chart has the layers of every micro-batch at every stage."""
_EXAMPLES = """\
examples:
  recycle show plan.json                          a chart as wide as the terminal
  recycle show plan.json --width 200 | less -SR   a wider one
  recycle show plan.json --rows all               every worker of a big plan
  recycle show plan.json --svg plan.svg --png plan.png
  recycle show plan.json --perfetto trace.json    then open it at https://ui.perfetto.dev
  recycle show plan.json --csv schedule.csv       a fault-free plan for torch.distributed.pipelining"""


def add_show_parser(subparsers: Subparsers) -> None:
    summary = "draw a plan in the terminal, or as SVG, PNG, Perfetto trace or CSV"
    parser = add_command(subparsers, "show", run_show, summary, _DESCRIPTION, _EXAMPLES)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="the plan file")
    add_file_options(parser, svg="write an SVG picture", png="write a PNG picture", perfetto="write a trace for ui.perfetto.dev")
    add_file_options(parser, csv="write one pipeline for torch.distributed.pipelining")
    parser.add_argument("--pipeline", type=int, default=0, metavar="N", help="the pipeline that --csv writes (default: 0)")
    add_width_option(parser)
    add_rows_option(parser)


def run_show(args: argparse.Namespace) -> None:
    """Write the files that were asked for, then print the chart. A plan that breaks rules is drawn, with a warning."""
    console = Terminal()
    width = chosen_width(args.width, console)
    plan = Plan.load(args.plan)
    written = _write_files(plan, args)
    print_lines(draw_chart(plan_timeline(plan), width, args.rows == "all"), console)
    if plan.cuts:
        print("", *draw_cuts(plan, width, args.rows == "all"), sep="\n")
    for path in written:
        print(f"wrote {path}")
    if broken := check(plan):
        print(f"warning: this plan is not legal; recycle check {args.plan} lists {len(broken)} violations", file=sys.stderr)


def _write_files(plan: Plan, args: argparse.Namespace) -> list[Path]:
    if args.csv:
        _refuse_failures(args.plan, plan.problem)
        write_text(args.csv, draw_torch_csv(plan, args.pipeline))
    if args.svg:
        write_text(args.svg, draw_svg(plan_timeline(plan)))
    if args.png:
        from recycle.report.render.png import draw_png  # matplotlib takes half a second to import, and only this needs it

        write_bytes(args.png, draw_png(plan_timeline(plan)))
    if args.perfetto:
        write_text(args.perfetto, draw_trace(plan))
    return [path for path in (args.csv, args.svg, args.png, args.perfetto) if path]


def _refuse_failures(path: Path, problem: Problem) -> None:
    """Raise if workers are dead, with the command that makes a plan of the same problem that --csv can write."""
    if problem.cluster.failed:
        raise UserError(
            f"{path} has {names_of(problem.cluster.failed)} dead, and the CSV form of torch.distributed.pipelining cannot say "
            f"that peers run a dead worker's micro-batches: only a plan without failures can be exported; make one with "
            f"recycle plan {_options_of(problem)} --out fault-free.json"
        )


def _options_of(problem: Problem) -> str:
    """The options of `recycle plan` that describe this problem without its failures."""
    shape, stage, comm_us = problem.shape, problem.profile.stages[0], problem.profile.stage_link.latency_us
    times = (stage.forward_us, stage.input_us, stage.weight_us)
    is_uniform = problem.profile == Profile.uniform(shape.num_stages, *times, comm_us)
    costs = f"--costs {','.join(map(str, times))}" + (f" --comm {comm_us}" if comm_us else "")
    unit = "B" if problem.memory.unit == "bytes" else ""
    limits = [str(limit) for limit in problem.memory.limits]
    options = [
        f"--pipelines {shape.num_pipelines} --stages {shape.num_stages} --microbatches {shape.num_microbatches}",
        costs if is_uniform else "--profile FILE",
        f"--memory {limits[0] if len(set(limits)) == 1 else ','.join(limits)}{unit}" if limits else "",
        "" if problem.techniques == Techniques() else f"--techniques {problem.techniques}",
    ]
    return " ".join(filter(None, options))
