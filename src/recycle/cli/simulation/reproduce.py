"""`recycle reproduce`: the paper's evaluation made again, ours beside the published numbers."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from recycle.cli.simulation.simulate import cache_folder
from recycle.cli.terminal import progress_bar
from recycle.core.files import refuse_unwritable, write_bytes, write_text
from recycle.report.record.tables import document
from recycle.sim.reproduce.ablation import ablation
from recycle.sim.reproduce.experiment import Result
from recycle.sim.reproduce.planning_time import planner
from recycle.sim.reproduce.scale import scale
from recycle.sim.reproduce.throughput_table import table

_EXAMPLES = """\
experiments:
  table     throughput on 32 GPUs with a failure every 6 h, 2 h, 30 min: Bamboo, Oobleck, ReCycle
  ablation  what each technique is worth, for 1 to 4 dead workers
  scale     models of 18 to 146 billion parameters on 256 to 1,536 GPUs; a month on 16,384
  planner   how long a plan library for 2,048 GPUs takes

examples:
  recycle reproduce table
  recycle reproduce ablation --out docs/reproduction"""

Tick = Callable[[int], None]
_EXPERIMENTS: dict[str, Callable[[Path | None, Tick], Result]] = {
    "table": table,
    "ablation": lambda folder, tick: ablation(folder),
    "scale": lambda folder, tick: scale(folder),
    "planner": lambda folder, tick: planner(tick),
}


def add_reproduce_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "reproduce",
        help="make the paper's evaluation again",
        description="Run an experiment of the paper and set our numbers beside the published ones.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiment", choices=list(_EXPERIMENTS), help="which one")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write NAME.md, NAME.json and NAME.png there")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="where plans are kept (default: the user's cache)")
    parser.add_argument("--no-cache", action="store_true", help="keep nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    parser.set_defaults(run=run_reproduce)


def run_reproduce(args: argparse.Namespace) -> int:
    if args.out:
        refuse_unwritable(args.out / f"{args.experiment}.md")
    with progress_bar() as progress:
        task = progress.add_task(f"reproducing {args.experiment}", total=None)
        result = _EXPERIMENTS[args.experiment](cache_folder(args), lambda done: progress.update(task, completed=done))
    tables = {table.caption: table.rows for table in result.tables}
    text = document(result.title, f"recycle reproduce {result.name}", result.assumptions, tables, f"{result.name}.png")
    facts = {"experiment": result.name, "assumptions": list(result.assumptions), "results": result.facts}
    if args.out:
        from recycle.report.figures.bar_groups import (  # matplotlib takes half a second to import, and only this needs it
            Panel,
            draw_bars,
        )

        panels = [Panel(panel.title, panel.groups, panel.series) for panel in result.panels]
        write_text(args.out / f"{result.name}.md", text)
        write_text(args.out / f"{result.name}.json", json.dumps(facts, indent=1) + "\n")
        write_bytes(args.out / f"{result.name}.png", draw_bars(panels, result.title, result.axis, result.groups))
    print(json.dumps(facts) if args.json else text)
    return 0
