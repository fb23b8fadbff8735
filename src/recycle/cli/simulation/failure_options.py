"""The options of `recycle simulate` that say which nodes fail, return and are slow, and how many spares there are."""

import argparse

from recycle.cli.arguments import add_file_options
from recycle.cli.simulation.slow_options import SLOW_OPTIONS, add_slow_options, read_slowdowns
from recycle.core.errors import UserError
from recycle.core.events.trace import Trace
from recycle.core.units import parse_duration_us
from recycle.sim import failure_traces
from recycle.sim.campaign.spares import spare_names, with_spares
from recycle.sim.failure_model import FAILURE_MODELS, parse_failure_model
from recycle.sim.job import SimulatedJob

FAILURE_MODELS_HELP = "\n".join(
    [
        "failure models, from published data:",
        *(f"  {name:<8} {model.source}" for name, model in FAILURE_MODELS.items()),
        "  mtbf=TIME  a rate of your own: the mean time between failures of a GPU",
        "each may be changed: llama3,times=2 (twice as many failures), repair=12h (mean of hardware repairs), machine=4 and",
        "rack=72 (GPUs that fail together)",
    ]
)


def add_failure_options(changes: argparse._ActionsContainer) -> None:
    """Add the options that `read_trace` reads."""
    changes.add_argument("--interval", metavar="TIME", help="one worker at random fails every so often: 30m, 2h")
    changes.add_argument("--mtbf", metavar="TIME", help="or each worker fails at random, once in so long on average: 90d")
    about = f"or GPUs, machines and racks fail and are repaired as published: {', '.join(FAILURE_MODELS)}, see below"
    changes.add_argument("--failures", metavar="MODEL", help=about)
    changes.add_argument("--rejoin", metavar="TIME", help="a failed worker comes back after so long (default: never)")
    add_file_options(changes, trace="or a trace, as 'recycle trace make' writes it")
    add_slow_options(changes)
    about = "so many spare workers are paid for, and take the places of failed ones when they are ready (default: 0)"
    changes.add_argument("--spares", type=int, default=0, metavar="N", help=about)
    changes.add_argument("--hours", type=float, metavar="H", help="how long (default: 6, or as long as the trace)")
    changes.add_argument("--seed", type=int, default=1, help="which workers fail (default: 1)")
    about = "simulate N seeds, from that one on: means with 90 %% intervals (default: 1)"
    changes.add_argument("--seeds", type=int, default=1, metavar="N", help=about)


def read_trace(args: argparse.Namespace, job: SimulatedJob) -> Trace:
    """The trace that the job sees: of a file or drawn from the seed, with spares in the places of failed workers."""
    ways = {"--interval": args.interval, "--mtbf": args.mtbf, "--failures": args.failures, "--trace": args.trace}
    given = [option for option, value in ways.items() if value is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} say the same thing, who fails when: give one of them")
    if args.hours is not None and not 0 < args.hours <= 24 * 3650:
        raise UserError(f"--hours is {args.hours}, but it must be above 0 and at most ten years")
    spares = spare_names(args.spares)
    trace = _loaded(args) if args.trace else _drawn(args, job, spares)
    return with_spares(trace, job.num_nodes, spares)


def _loaded(args: argparse.Namespace) -> Trace:
    if args.rejoin is not None:
        raise UserError("a trace says itself who returns when: leave --rejoin out")
    if any(getattr(args, option) is not None for option in SLOW_OPTIONS):
        raise UserError("a trace says itself who is slow when: leave --slow, --slow-links and --drift out")
    trace = Trace.load(args.trace)
    return trace if args.hours is None else trace.until(round(args.hours * 3.6e9))


def _drawn(args: argparse.Namespace, job: SimulatedJob, spares: tuple[str, ...]) -> Trace:
    """A trace of all workers and spares: spares fail like workers."""
    end_us = round((6 if args.hours is None else args.hours) * 3.6e9)
    nodes = (*failure_traces.worker_names(job.shape.num_pipelines, job.shape.num_stages), *spares)
    return _failures(args, job, nodes, end_us).with_slowdowns(read_slowdowns(args, nodes, end_us))


def _failures(args: argparse.Namespace, job: SimulatedJob, nodes: tuple[str, ...], end_us: int) -> Trace:
    rejoin_us = parse_duration_us(args.rejoin) if args.rejoin is not None else None
    if args.failures is not None:
        if rejoin_us is not None:
            raise UserError("a failure model says itself when failed nodes are back: leave --rejoin out, or write repair=12h")
        model = parse_failure_model(args.failures)
        return failure_traces.model_trace(model, nodes, job.gpus_per_worker, end_us, args.seed)
    if args.mtbf is not None:
        return failure_traces.poisson_trace(nodes, parse_duration_us(args.mtbf), end_us, args.seed, rejoin_us)
    if args.interval is None and args.rejoin is not None:
        raise UserError("--rejoin says when failed workers return, but none fails: give --interval or --mtbf, too")
    interval_us = parse_duration_us(args.interval) if args.interval is not None else end_us
    return failure_traces.periodic_trace(nodes, interval_us, end_us, args.seed, rejoin_us)
