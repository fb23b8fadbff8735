"""`recycle reproduce`: run an experiment of the paper's evaluation, and print our numbers beside the published ones."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from recycle.cli.arguments import Subparsers, add_command, output_path
from recycle.cli.simulation.simulate import add_cache_options, cache_folder
from recycle.cli.terminal import progress_bar
from recycle.core.files import refuse_unwritable, write_bytes, write_text
from recycle.report.record.tables import document
from recycle.sim.reproduce.ablation import run_ablation
from recycle.sim.reproduce.experiment_result import ExperimentResult
from recycle.sim.reproduce.fail_slow import run_fail_slow
from recycle.sim.reproduce.planning_time import run_planning_time
from recycle.sim.reproduce.scale import run_scale
from recycle.sim.reproduce.thousand import run_thousand
from recycle.sim.reproduce.throughput_table import run_throughput_table

_EXAMPLES = """\
experiments:
  table     throughput on 32 GPUs with a failure every 6 h, 2 h, 30 min: Bamboo, Oobleck, ReCycle
  ablation  what each technique is worth, for 1 to 4 dead workers
  scale     models of 18 to 146 billion parameters on 256 to 1,536 GPUs; a month on 16,384
  slow      slow workers, slow links and drift on the same clusters
  thousand  1,024 GPUs for 30 days, ten seeds: what is scheduling, what is fault handling
  planner   how long a plan library for 2,048 GPUs takes

examples:
  recycle reproduce table
  recycle reproduce ablation --out docs/reproduction"""

Tick = Callable[[int], None]
_EXPERIMENTS: dict[str, Callable[[Path | None, Tick], ExperimentResult]] = {
    "table": run_throughput_table,
    "ablation": lambda folder, tick: run_ablation(folder),
    "scale": lambda folder, tick: run_scale(folder),
    "slow": lambda folder, tick: run_fail_slow(folder),
    "thousand": run_thousand,
    "planner": lambda folder, tick: run_planning_time(tick),
}


def add_reproduce_parser(subparsers: Subparsers) -> None:
    summary = "run an experiment of the paper's evaluation"
    description = "Run an experiment of the paper and print our numbers beside the published ones."
    parser = add_command(subparsers, "reproduce", run_reproduce, summary, description, _EXAMPLES)
    parser.add_argument("experiment", choices=list(_EXPERIMENTS), help="which one")
    parser.add_argument("--out", type=output_path, metavar="FOLDER", help="write NAME.md, NAME.json and NAME.png there")
    add_cache_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")


def run_reproduce(args: argparse.Namespace) -> None:
    if args.out:
        refuse_unwritable(args.out / f"{args.experiment}.md")
    with progress_bar() as progress:
        task = progress.add_task(f"reproducing {args.experiment}", total=None)
        result = _EXPERIMENTS[args.experiment](cache_folder(args), lambda done: progress.update(task, completed=done))
    tables = {table.caption: table.rows for table in result.tables}
    made_by, picture = f"recycle reproduce {result.name}", f"{result.name}.png"
    text = document(result.title, made_by, result.assumptions, tables, picture, result.findings, result.answer)
    facts = {"experiment": result.name, "assumptions": list(result.assumptions), "results": result.facts}
    facts |= {"findings": list(result.findings)} if result.findings else {}
    facts |= {"answer": list(result.answer)} if result.answer else {}
    if args.out:
        # matplotlib takes half a second to import
        from recycle.report.figures.bar_groups import Panel, draw_bars

        panels = [Panel(panel.title, panel.groups, panel.series) for panel in result.panels]
        write_text(args.out / f"{result.name}.md", text)
        write_text(args.out / f"{result.name}.json", json.dumps(facts, indent=1) + "\n")
        write_bytes(args.out / f"{result.name}.png", draw_bars(panels, result.title, result.axis, result.groups))
    print(json.dumps(facts) if args.json else text)
