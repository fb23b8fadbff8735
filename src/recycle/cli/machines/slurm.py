"""`recycle slurm`: it submits a job file as a batch job of Slurm, or prints the batch script."""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from recycle.cli.arguments import Subparsers, add_command, output_path
from recycle.cli.machines.endpoint_flags import add_tls_arguments, read_tls_paths
from recycle.cli.training.train_config import add_config_arguments, read_config
from recycle.core.errors import FileProblem, UserError
from recycle.integrations.job_commands import PORT, PROGRAM, JobCommands
from recycle.integrations.slurm import SCRIPT, SlurmJob, output_pattern, render_batch_script, submit_batch_script

_DESCRIPTION = """\
Train a job file as a batch job of Slurm: a coordinator on the first node, and on every node an agent, which runs its workers. The
loss of a node does not end the job. Shortly before the time limit it writes a checkpoint, and is queued again; it goes on from
there, and so does the same command for a run folder that has a checkpoint already. FILE, --out and the environment of this
command must be there on every node, as on a shared file system."""
_EXAMPLES = """\
examples:
  32 workers on 4 nodes with 8 GPUs each
    recycle slurm train.py --nodes 4 --gpus-per-node 8 --partition gpu --time 24:00:00 --out /shared/runs/a -- --device cuda
  see the batch script, and do not submit it
    recycle slurm train.py --nodes 4 --gpus-per-node 8 --out /shared/runs/a --print -- --device cuda
  nodes without GPUs, any further flags of sbatch, and other options of the job after --
    recycle slurm train.py --nodes 3 --workers-per-node 2 --cpus-per-node 4 --out /shared/runs/b \\
      --sbatch=--constraint=fast --sbatch=--mem=64G -- --steps 1000 --checkpoint.every 50"""
TOKEN = "token"


def add_slurm_parser(subparsers: Subparsers) -> None:
    summary = "submit a job on several machines to Slurm"
    usage = "recycle slurm FILE --nodes N --out FOLDER [options] [-- options of 'recycle coordinator']"
    parser = add_command(subparsers, "slurm", run_slurm, summary, _DESCRIPTION, _EXAMPLES, usage)
    parser.add_argument("file", type=Path, metavar="FILE", help="the job file (.py)")
    parser.add_argument("--nodes", type=_positive, required=True, metavar="N", help="how many nodes")
    about = "the folder of the run, which every node sees; made if it is not there"
    parser.add_argument("--out", type=output_path, required=True, metavar="FOLDER", help=about)
    about = "how many workers an agent runs (one for each GPU)"
    parser.add_argument("--workers-per-node", type=_positive, metavar="N", help=about)
    parser.add_argument("--gpus-per-node", type=_positive, metavar="N", help="how many GPUs of each node Slurm gives the job")
    parser.add_argument("--cpus-per-node", type=_positive, metavar="N", help="how many CPUs of each node Slurm gives the job")
    parser.add_argument("--partition", default="", metavar="NAME", help="the partition (the cluster's default)")
    parser.add_argument("--account", default="", metavar="NAME", help="the account to charge (your default)")
    parser.add_argument("--time", default="", metavar="LIMIT", help="the time limit, as 24:00:00 (the partition's default)")
    about = "how long before the time limit the job stops and is queued again, in seconds (%(default)s)"
    parser.add_argument("--grace", type=_positive, default=300, metavar="S", help=about)
    parser.add_argument("--job-name", default="", metavar="NAME", help="the name of the job in Slurm (that of the file)")
    parser.add_argument("--port", type=_port, default=PORT, metavar="N", help="the coordinator's port (%(default)s)")
    about = "the network interface by which tensors go (the one by which the coordinator is reached)"
    parser.add_argument("--interface", default="", metavar="NAME", help=about)
    add_tls_arguments(parser)
    about = "a further flag of sbatch, such as --sbatch=--constraint=a100; may be repeated"
    parser.add_argument("--sbatch", action="append", default=[], metavar="FLAG", help=about)
    parser.add_argument("--print", action="store_true", dest="prints", help="print the batch script, and submit nothing")
    parser.set_defaults(job_flags=())


def run_slurm(args: argparse.Namespace) -> None:
    if not args.file.is_file():
        raise FileProblem(f"there is no job file {args.file}")
    _refuse_bad_flags(args.file, args.job_flags)
    out = Path(os.path.abspath(args.out))  # links stay: the nodes may see the folder by no other name
    commands = JobCommands(
        os.path.abspath(args.file),
        str(out),
        str(out / TOKEN),
        args.port,
        tuple(args.job_flags),
        args.workers_per_node,
        interface=args.interface,
        tls=read_tls_paths(args),
    )
    job = SlurmJob(
        commands,
        args.nodes,
        os.getcwd(),
        args.job_name or args.file.stem,
        args.gpus_per_node,
        args.cpus_per_node,
        args.partition,
        args.account,
        args.time,
        args.grace,
        _program_folder(),
        tuple(args.sbatch),
    )
    if args.prints:
        print(render_batch_script(job), end="")
        return
    number = submit_batch_script(job)
    print(f"job {number} is submitted, as {out / SCRIPT}; what it prints: {output_pattern(str(out)).replace('%j', number)}")


class _FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"after --: {message}; 'recycle coordinator --help' lists the options of a job")


def _refuse_bad_flags(file: Path, flags: Sequence[str]) -> None:
    """Raise UserError if the coordinator would not understand these flags: a job may wait for days until it starts."""
    parser = _FlagParser(add_help=False)
    add_config_arguments(parser)
    read_config(parser.parse_args([str(file), *flags]))


def _program_folder() -> str:
    """The folder of the program `recycle` of this environment, empty if there is none."""
    beside = Path(sys.executable).parent
    found = shutil.which(PROGRAM, path=str(beside)) or shutil.which(PROGRAM)
    return os.path.abspath(Path(found).parent) if found else ""


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1024 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port from 1024 to 65535")
    return int(text)
