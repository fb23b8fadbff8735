"""`recycle agent`: the workers of one machine, in a job that a coordinator runs."""

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from recycle.cli.arguments import Subparsers, add_command
from recycle.cli.machines.endpoint_flags import add_job_arguments, read_endpoint
from recycle.cli.machines.worker import take_part
from recycle.control.net.handshake import Endpoint
from recycle.core.errors import FileProblem, UserError
from recycle.host.interfaces import address_of
from recycle.host.process_title import set_title

_DESCRIPTION = """\
Run the workers of this machine in a job that 'recycle coordinator' runs: one for each GPU, or as many as --workers says. A worker
that dies is started again after a pause; one that dies again and again is set aside, and named. Ctrl-C or SIGTERM lets all of
them leave after the present step: nothing is redone, and the other machines go on. No worker outlives its agent."""
_EXAMPLES = """\
examples:
  one worker for each GPU
    recycle agent 10.0.0.1:29400 train.py --token-file token
  four workers on a machine without GPUs
    recycle agent 10.0.0.1:29400 train.py --token-file token --workers 4
  a job with three coordinators, of which one leads
    recycle agent 10.0.0.1:29400,10.0.0.2:29400,10.0.0.3:29400 train.py --token-file token
  only these GPUs, with the output of each worker in a file
    recycle agent 10.0.0.1:29400 train.py --token-file token --gpus 0,2 --logs logs"""


def add_agent_parser(subparsers: Subparsers) -> None:
    summary = "run the workers of this machine in a job on several machines"
    parser = add_command(subparsers, "agent", run_agent, summary, _DESCRIPTION, _EXAMPLES)
    add_job_arguments(parser)
    about = "how many workers; they share the GPUs if there are fewer (one for each GPU)"
    parser.add_argument("--workers", type=_count, metavar="N", help=about)
    about = "which GPUs: all, none, or their numbers or UUIDs, with commas (all)"
    parser.add_argument("--gpus", default="all", metavar="LIST", help=about)
    about = "how often an hour a worker is started again before it is set aside (%(default)s)"
    parser.add_argument("--restarts", type=int, default=5, metavar="N", help=about)
    about = "how long workers may take to leave before they are ended, in seconds (%(default)g)"
    parser.add_argument("--grace", type=float, default=600.0, metavar="S", help=about)
    about = "the exit code of an agent that a signal has asked to stop, for engines that take 0 for the end of the job (0)"
    parser.add_argument("--stopped-code", type=int, default=0, metavar="N", help=about)
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="also write what each worker prints to a file there")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of workers from 1 to 1024")
    return int(text)


def run_agent(args: argparse.Namespace) -> int:
    endpoint = read_endpoint(args)
    if args.file is not None and not args.file.is_file():
        raise FileProblem(f"there is no job file {args.file}")
    if args.interface:
        address_of(args.interface)  # an unknown one is refused now
    from recycle.runtime.launch.agent import Agent
    from recycle.runtime.launch.forkserver import fork_context
    from recycle.runtime.launch.gpus import choose_gpus, find_gpus, hold
    from recycle.runtime.launch.supervisor import WorkerSlot

    set_title(f"recycle agent of {args.address}")
    context = fork_context([_Worker.__module__])
    gpus = choose_gpus(find_gpus(context), args.gpus)
    if not gpus and args.workers is None:
        raise UserError("this machine has no GPU to use: say with --workers how many workers it runs")
    num_workers = args.workers or len(gpus)
    slots = [WorkerSlot(number, gpus[number % len(gpus)].uuid if gpus else "") for number in range(num_workers)]
    with ExitStack() as stack:
        for gpu in gpus[:num_workers]:
            stack.enter_context(hold(gpu))
        worker = _Worker(endpoint, args.file, args.interface)
        agent = Agent(context, slots, worker, args.restarts, args.grace, _say, args.logs)
        agent.run()
    return int(args.stopped_code) if agent.is_asked_to_stop else 0


class _Worker:
    """Takes part in a job as one worker: what the agent has its processes do."""

    def __init__(self, endpoint: Endpoint, file: Path | None, interface: str) -> None:
        self._endpoint, self._file, self._interface = endpoint, file.resolve() if file is not None else None, interface

    def __call__(self, say: Callable[[str], None]) -> None:
        take_part(self._endpoint, self._file, "", self._interface, say)


def _say(sentence: str) -> None:
    print(f"agent: {sentence}", file=sys.stderr, flush=True)
