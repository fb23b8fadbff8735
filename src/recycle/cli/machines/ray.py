"""`recycle ray`: a job whose workers run on a Ray cluster."""

import argparse
import json
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

from recycle.cli.arguments import Subparsers, add_command, output_path
from recycle.cli.machines.endpoint_flags import add_tls_arguments, read_tls
from recycle.cli.training.train import describe_run
from recycle.cli.training.train_config import add_config_arguments, given_flags
from recycle.core.errors import UserError

_DESCRIPTION = """\
Train a job file on a Ray cluster: the coordinator runs here, and every worker is a Ray actor with a GPU, or with CPUs if the job
computes on them. When the cluster loses a machine, the other workers go on training; Ray starts the lost ones elsewhere when it
has room, and they join again. Ctrl-C or SIGTERM ends the job with a checkpoint, and leaves nothing behind on the cluster.

The job file and the modules beside it that it imports are sent to the machines, which need the same recycle and torch.
With --working-dir, Ray copies a whole folder, in which workers then run."""
_EXAMPLES = """\
examples:
  on the cluster that runs on this machine
    recycle ray train.py --workers 12 --out runs/a
  on another one, with four CPUs for each worker, if there is room within ten minutes
    recycle ray train.py --workers 12 --address 10.0.0.1:6379 --cpus-per-worker 4 --wait 600 --out runs/a
  go on with a run that was stopped, from its last checkpoint
    recycle ray --resume runs/a

--workers may be more than the job has places: the others wait as spares. This needs Ray: pip install -e '.[ray]' in a clone."""


def add_ray_parser(subparsers: Subparsers) -> None:
    summary, usage = "train a job file on a Ray cluster", "recycle ray FILE [options]"
    parser = add_command(subparsers, "ray", run_ray, summary, _DESCRIPTION, _EXAMPLES, usage)
    add_config_arguments(parser, "a job file (.py), or the TOML file of a run")
    about = "how many workers (one for each place of the job)"
    parser.add_argument("--workers", type=int, metavar="N", help=about)
    about = "where the cluster is: HOST:PORT, or auto for the one of this machine or of RAY_ADDRESS (auto)"
    parser.add_argument("--address", default="auto", metavar="HOST:PORT", help=about)
    about = "the CPUs that Ray reserves for each worker (%(default)g)"
    parser.add_argument("--cpus-per-worker", type=float, default=1.0, metavar="N", help=about)
    about = "a folder that Ray copies to every machine, and in which workers run"
    parser.add_argument("--working-dir", type=Path, metavar="FOLDER", help=about)
    about = "where the coordinator listens, at the address of this machine in the cluster (a free port)"
    parser.add_argument("--listen-port", type=int, default=0, metavar="PORT", help=about)
    about = "how long to wait until the cluster has room for all workers, in seconds (for ever)"
    parser.add_argument("--wait", type=float, metavar="S", help=about)
    about = "how long workers may take to leave before they are ended, in seconds (%(default)g)"
    parser.add_argument("--grace", type=float, default=600.0, metavar="S", help=about)
    add_tls_arguments(parser)
    about = "record the run there, with checkpoints (a new folder in runs/)"
    parser.add_argument("--out", type=output_path, metavar="FOLDER", help=about)
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this folder, from its last checkpoint")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def run_ray(args: argparse.Namespace) -> None:
    from recycle.integrations.ray import RayOptions, train_on_ray

    if args.resume is not None and (args.config is not None or args.out is not None):
        raise UserError("--resume goes on with what is in its folder: leave FILE and --out out")
    if args.resume is None and args.config is None:
        raise UserError("name a job file, or the run to go on with by --resume")
    out = None
    if args.resume is None:
        out = args.out or Path("runs", f"{args.config.stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    options = RayOptions(
        address=args.address,
        cpus_per_worker=args.cpus_per_worker,
        working_dir=args.working_dir,
        port=args.listen_port,
        wait_s=args.wait,
        grace_s=args.grace,
        tls=read_tls(args),
    )
    with redirect_stdout(sys.stderr):  # Ray prints what happens on its cluster; standard output has only the result
        facts = train_on_ray(
            args.config, workers=args.workers, out=out, resume=args.resume, flags=given_flags(args), options=options
        )
    print(json.dumps(facts) if args.json else describe_run(facts, out or args.resume))
