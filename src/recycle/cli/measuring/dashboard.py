"""`recycle dashboard`: a page in the browser about runs, while they go on and afterwards."""

import argparse
import os
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from recycle.cli.arguments import Subparsers, add_command
from recycle.cli.live.page_process import DEFAULT_PORT
from recycle.cli.machines.endpoint_flags import read_token
from recycle.cli.training.plan_choice import choose_source
from recycle.cli.training.train_config import parse_config
from recycle.core.errors import FileProblem, UserError
from recycle.core.events.record_file import CONFIG
from recycle.core.plans.library import without_failures
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import PlanSource
from recycle.host.process_lifetime import stop_with_parent
from recycle.planner.live_planner import Planner

if TYPE_CHECKING:
    from recycle.dashboard.web.injection import Injector

_DESCRIPTION = """\
Serve a page about runs: workers, loss and throughput, iterations beside their plans, recoveries, events, results of campaigns. It
reads the folders that 'recycle train --out' and 'recycle coordinator --out' write, while they grow and afterwards, and records of
'recycle simulate --records'. Nothing is fetched from another host.

By default only this machine can open the page. With --host it can be opened from others, by whoever has the token."""
_EXAMPLES = """\
examples:
  recycle dashboard runs                     all runs in a folder
  recycle dashboard runs/a --open            one run, in the browser of this machine
  recycle dashboard runs --host 0.0.0.0 --token-file page.token
  recycle dashboard runs --name pages.example          behind a proxy with TLS, https://pages.example
  ssh -L 8265:127.0.0.1:8265 HOST            then open http://127.0.0.1:8265 here, for a page on HOST

While a run goes on, 'recycle train --dashboard' and 'recycle coordinator --dashboard' serve the same page."""


def add_dashboard_parser(subparsers: Subparsers) -> None:
    summary = "a page in the browser about runs, live and afterwards"
    parser = add_command(subparsers, "dashboard", run_dashboard, summary, _DESCRIPTION, _EXAMPLES)
    parser.add_argument("path", type=Path, metavar="FOLDER", help="a folder with runs, the folder of a run, or a record")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, metavar="PORT", help=f"where it listens; 0 is any free port ({DEFAULT_PORT})"
    )
    about = "the address on which it listens; 0.0.0.0 is every one of this machine (127.0.0.1)"
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=about)
    about = "what a browser must know to read the page; made if there is no such file (with --host: beside FOLDER)"
    parser.add_argument("--token-file", type=Path, metavar="FILE", help=about)
    about = "a name by which browsers reach this page, as that of a proxy with TLS; may be given several times"
    parser.add_argument("--name", action="append", default=[], metavar="NAME", help=about)
    parser.add_argument("--open", action="store_true", help="open the page in the browser of this machine")
    parser.add_argument("--run-pipe", type=int, default=-1, help=argparse.SUPPRESS)  # of the command that started this one
    parser.add_argument("--allow-injection", action="store_true", help=argparse.SUPPRESS)


def run_dashboard(args: argparse.Namespace) -> None:
    is_of_a_run = args.run_pipe >= 0
    if not is_of_a_run and not args.path.exists():
        raise FileProblem(f"cannot read {args.path}: there is no such folder or file; give a folder of runs")
    if not 0 <= args.port <= 65535:
        raise UserError(f"there is no port {args.port}: choose one of 1024 to 65535, or 0 for any free one")
    if args.allow_injection and not is_of_a_run:
        raise UserError("--allow-injection is for a run that goes on: give it to 'recycle train --dashboard'")
    try:
        from recycle.dashboard.web.serve import ServerOptions, serve_page
    except ImportError as missing:
        raise UserError(
            f"the page needs more packages ({missing}): pip install -e '.[dashboard]' in a clone of ReCycle"
        ) from None
    token = read_token(args.token_file, makes_one=True) if args.token_file is not None else ""
    options = ServerOptions(args.host, args.port, token, tuple(args.name), args.allow_injection)
    if is_of_a_run:
        stop_with_parent()
    injector = _injector(args.run_pipe) if args.allow_injection else None

    def say(url: str) -> None:
        print(url if is_of_a_run else f"the page is at {url}  (Ctrl-C ends it)", flush=True)
        if args.open:
            webbrowser.open(url)

    with suppress(KeyboardInterrupt):
        serve_page(args.path.absolute(), options, say, plan_source_of, injector)
    print("the page is closed", file=sys.stderr)


def _injector(pipe: int) -> "Injector":
    from multiprocessing.connection import Connection

    from recycle.dashboard.web.injection import PipeInjector

    os.set_inheritable(pipe, False)
    return PipeInjector(Connection(pipe))


def plan_source_of(folder: Path, today: Plan) -> PlanSource:
    """What the run in a folder asks for plans: by its configuration if it has one, else by its plan alone."""
    from recycle.dashboard.reading.served_folder import ServedFolder

    try:  # a link is not followed: whoever has the page could read parts of another file in an error
        config = parse_config(ServedFolder(folder).read_text(folder / CONFIG))
    except (OSError, UnicodeDecodeError, UserError):
        return Planner(without_failures(today.problem), given=today)
    return choose_source(today, config.cluster)
