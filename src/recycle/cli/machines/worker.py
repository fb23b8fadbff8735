"""`recycle worker`: one worker process of a job that a coordinator runs."""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from recycle.cli.arguments import Subparsers, add_command
from recycle.cli.machines.endpoint_flags import add_job_arguments, read_endpoint
from recycle.cli.machines.job_description import spec_from_description
from recycle.control.net.handshake import Endpoint
from recycle.core.cluster import Worker
from recycle.host.interfaces import address_of
from recycle.host.scratch import scratch

_DESCRIPTION = """\
Take part in a job that 'recycle coordinator' runs, as one worker; 'recycle agent' runs one for every GPU of a machine. A worker
that is started while the job runs takes a free place at the next step, and copies its stage's state from a peer; if no place is
free, it waits as a spare. SIGTERM lets it leave after the present step."""
_EXAMPLES = """\
examples:
  recycle worker 10.0.0.1:29400 train.py --token-file token
  recycle worker 10.0.0.1:29400 train.py --token-file token --place W1_2

exit codes: 0 the job is over, or the worker was asked to leave; 1 it failed; 2 input that cannot be used; 74 it cannot use its
device, or could not load its stage; 75 no coordinator answered, or another try may succeed; 78 it was refused."""


def add_worker_parser(subparsers: Subparsers) -> None:
    summary = "take part in a job on several machines, as one worker"
    parser = add_command(subparsers, "worker", run_worker, summary, _DESCRIPTION, _EXAMPLES)
    add_job_arguments(parser)
    parser.add_argument("--place", "--seat", default="", metavar="W1_2", help="the preferred place; any free one if left out")


def run_worker(args: argparse.Namespace) -> None:
    from recycle.runtime.launch.forkserver import configure_process

    place = str(Worker.parse(args.place)) if args.place else ""
    endpoint = read_endpoint(args)
    configure_process()
    import recycle.runtime.launch.preload  # noqa: F401  before the coordinator expects heartbeats

    take_part(endpoint, args.file, place, args.interface, _say)


def take_part(endpoint: Endpoint, file: Path | None, place: str, interface: str, say: Callable[[str], None]) -> None:
    """Take part in the job at `endpoint` to its end, with this machine's job `file`; `say` gets what the worker is doing."""
    from recycle.runtime.worker.worker import join_job

    if interface:
        address_of(interface)  # an unknown one is refused now
    with scratch() as folder:
        make_spec = partial(spec_from_description, endpoint, folder, file, interface)
        join_job(endpoint, place, make_spec, say=say, interface=interface)


def _say(sentence: str) -> None:
    print(f"worker, process {os.getpid()}: {sentence}", file=sys.stderr, flush=True)
