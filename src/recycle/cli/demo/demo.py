"""`recycle demo`: a training run with failures beside one without; or, with --plans, the worked example of the paper."""

import argparse
import json
import os
from dataclasses import replace

from rich.console import Console

from recycle.cli.arguments import Subparsers, add_command, output_path
from recycle.cli.demo import twin_runs
from recycle.cli.demo.demo_text import describe_cores, describe_recoveries, describe_setting, describe_twins, phase_table
from recycle.cli.demo.twin_runs import FEWEST_STEPS, DemoSettings, make_demo_job, perform
from recycle.cli.demo.worked_example import draw_plans
from recycle.cli.live.page_process import add_page_arguments, served_page
from recycle.cli.terminal import Terminal
from recycle.core.errors import UserError

_DESCRIPTION = """\
Train a small GPT with 12 workers on this machine. One is killed in the middle of an iteration, another hangs, and the first comes
back. Then train it again with no failure, and say whether losses and weights are equal, bit for bit. It takes one to two minutes
on two cores.

With --plans nothing is trained: the worked example of the paper, 3 pipelines of 4 stages with 6 micro-batches each and W1_2 dead,
is planned and drawn, with the techniques switched on one by one."""
_EPILOG = """\
examples:
  recycle demo
  recycle demo --quick --json
  recycle demo --dashboard --allow-injection --out runs/demo     with a page, on which a click kills a worker
  recycle demo --plans | less -R

exit codes: 0 losses and weights are equal; 1 they are not; 2 input that cannot be used; 20 a worker failed; 130 interrupted."""


def add_demo_parser(subparsers: Subparsers) -> None:
    summary = "lose workers while training, and see that nothing is lost"
    parser = add_command(subparsers, "demo", run_demo, summary, _DESCRIPTION, _EPILOG)
    parser.add_argument("--steps", type=int, metavar="N", help=f"steps to train, at least {FEWEST_STEPS}")
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps: half a minute")
    parser.add_argument("--json", action="store_true", help="print what came of it as one JSON object")
    parser.add_argument("--out", type=output_path, metavar="FOLDER", help="record the run with failures there")
    add_page_arguments(parser, may_inject=True)
    parser.add_argument("--plans", action="store_true", help="plan and draw the worked example of the paper; needs no torch")


def run_demo(args: argparse.Namespace) -> int:
    if not args.plans:
        return _show(read_setting(args), args)
    for_training = {"--steps": args.steps is not None, "--quick": args.quick, "--json": args.json, "--out": args.out is not None}
    for_training |= {"--dashboard": args.dashboard is not None, "--allow-injection": args.allow_injection}
    if given := [flag for flag, is_given in for_training.items() if is_given]:
        raise UserError(f"--plans draws and trains nothing: leave {' and '.join(given)} out")
    draw_plans()
    return 0


def read_setting(args: argparse.Namespace) -> DemoSettings:
    setting = twin_runs.QUICK if args.quick else twin_runs.FULL
    return setting if args.steps is None else replace(setting, num_steps=args.steps)


def _show(setting: DemoSettings, args: argparse.Namespace) -> int:
    """Run and show the demo; with --json, standard output gets the JSON object, and the error stream all text."""
    as_json, out = args.json, args.out
    console = Terminal(stderr=as_json)

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False)

    with Console(stderr=True).status("loading torch, and planning (the first time on a machine takes some seconds longer)"):
        job = make_demo_job(setting)
    say(f"{describe_setting(setting)}\n")
    with served_page(args, out) as page:
        if page is not None:
            click = " Click on a worker there to kill, hang, slow or start it." if args.allow_injection else ""
            console.print(f"{page.sentence}{click}\n", style="bold", markup=False, highlight=False, soft_wrap=True)
        outcome = perform(setting, job, lambda sentence: say(f"\n{sentence}", "italic"), out, page.injections if page else None)
    verdict, *hashes = describe_twins(outcome.twins)
    say(f"\n{verdict}", "bold green" if outcome.twins.are_equal else "bold red")
    # Not wrapped, so that hashes and columns stay whole.
    console.print("\n".join([*hashes, "", *phase_table(outcome.phases)]), markup=False, highlight=False, soft_wrap=True)
    notes = [*describe_recoveries(outcome, setting), *describe_cores(setting.shape, os.cpu_count() or 1)]
    say("\n" + " ".join([*notes, f"The demo took {outcome.seconds:.0f} s."]))
    if out is not None:
        say(f"The run with failures is in {out}: recycle dashboard {out} shows it again.")
    if as_json:
        print(json.dumps(outcome.to_json()))
    return 0 if outcome.twins.are_equal else 1
