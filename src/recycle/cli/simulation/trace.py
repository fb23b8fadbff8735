"""`recycle trace make` generates a failure trace; `recycle trace show` summarizes and draws one."""

import argparse
import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

from recycle.cli.arguments import Subparsers, add_command, add_file_options, add_width_option
from recycle.cli.simulation.slow_options import SLOW_OPTIONS, add_slow_options, read_slowdowns
from recycle.cli.terminal import Terminal, chosen_width, print_lines
from recycle.core.errors import UserError
from recycle.core.events.trace import Trace, live_counts
from recycle.core.files import refuse_unwritable, write_bytes
from recycle.core.units import format_duration, parse_duration_us, parse_share_or_count
from recycle.report.figures.trace_chart import draw_strip, draw_trace_png
from recycle.sim import failure_traces
from recycle.sim.failure_model import parse_failure_model

_OPTIONS_OF_KIND = {
    "none": (),
    "every": ("interval",),
    "poisson": ("mtbf",),
    "bursts": ("interval", "burst"),
    "racks": ("mtbf", "rack"),
    "model": ("failures", "gpus"),
}
_NOT_NEEDED = ("burst", "gpus")
_EXAMPLE_OF_OPTION = {"interval": "30m", "mtbf": "30d", "burst": "25%", "rack": "4", "failures": "llama3", "gpus": "8"}
_EXAMPLES = """\
examples:
  recycle trace make --kind every --pipelines 4 --stages 8 --interval 30m --hours 6 --out trace.csv
  recycle trace show trace.csv"""
_MAKE_DESCRIPTION = """\
Make a trace: a line 'milliseconds,add|remove|hang,node' for each node that joins, leaves or hangs, and a line
'milliseconds,slow|slow-link,node,speed,milliseconds' for each time in which a node or its link is slow.

  none     no node leaves; for traces of slow nodes
  every    one random node leaves each --interval
  poisson  each node leaves after a random time, --mtbf on average
  bursts   like spot instances: up to --burst nodes leave together, each --interval on average; with --rejoin they
           come back a few at a time, the first after that time
  racks    each --rack nodes in a row leave together, and come back together; --mtbf is that of a rack
  model    GPUs, machines and racks fail, hang and are repaired as published: --failures llama3, see
           'recycle simulate --help'; a node has --gpus GPUs

The same seed makes the same trace on every machine, and a longer one begins like a shorter one."""
_MAKE_EXAMPLES = """\
durations are a number and one of ms, s, m, h, d: 45s, 30m, 1.5h

examples:
  a failure every half an hour, back an hour later
    recycle trace make --kind every --pipelines 4 --stages 8 --interval 30m --rejoin 1h --hours 6 --out trace.csv
  32 nodes that each fail once in 30 days on average
    recycle trace make --kind poisson --nodes 32 --mtbf 30d --rejoin 4h --days 60 --seed 7 --out trace.csv
  spot instances, shown without a file
    recycle trace make --kind bursts --nodes 64 --interval 1h --burst 25% --rejoin 10m --days 1 | recycle trace show /dev/stdin
  nobody fails, but workers and links are slow as often as published
    recycle trace make --kind none --pipelines 4 --stages 8 --slow published --slow-links published --days 1 --out slow.csv
  racks of 8 that lose power once in a year
    recycle trace make --kind racks --nodes 128 --rack 8 --mtbf 365d --rejoin 6h --days 90 --out trace.csv
  1,024 machines of 8 GPUs that fail as often as when Llama 3 was trained
    recycle trace make --kind model --failures llama3 --nodes 1024 --gpus 8 --days 30 --out trace.csv"""
_SHOW_EXAMPLES = """\
examples:
  recycle trace show trace.csv
  recycle trace show trace.csv --png trace.png
  recycle trace show trace.csv --json | jq .mean_live"""


def add_trace_parser(subparsers: Subparsers) -> None:
    summary = "make or show a trace of nodes that leave and join"
    description = "Generate a trace of nodes that leave and join, or show one."
    parser = add_command(subparsers, "trace", None, summary, description, _EXAMPLES)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_make_parser(actions)
    _add_show_parser(actions)


def _add_make_parser(actions: Subparsers) -> None:
    summary = "make a trace from a few numbers and a seed"
    parser = add_command(actions, "make", run_trace_make, summary, _MAKE_DESCRIPTION, _MAKE_EXAMPLES)
    parser.add_argument("--kind", choices=tuple(_OPTIONS_OF_KIND), required=True, help="how nodes fail")
    nodes = parser.add_argument_group("nodes: the workers of a cluster (W0_0, ...), or any number")
    nodes.add_argument("--pipelines", type=int, metavar="D", help="data-parallel pipelines")
    nodes.add_argument("--stages", type=int, metavar="S", help="stages of each pipeline")
    nodes.add_argument("--nodes", type=int, metavar="N", help="so many nodes instead, named node0 and so on")
    times = parser.add_argument_group("failures")
    times.add_argument("--interval", metavar="TIME", help="between two failures (every), or bursts on average")
    times.add_argument("--mtbf", metavar="TIME", help="mean time between failures of a node (poisson) or a rack (racks)")
    times.add_argument("--burst", metavar="N|P%", help="the most nodes that leave together (bursts; default: 25%%)")
    times.add_argument("--rack", type=int, metavar="N", help="nodes of a rack (racks)")
    times.add_argument("--failures", metavar="MODEL", help="the failure model (model), such as llama3 or rsc1,repair=12h")
    times.add_argument("--gpus", type=int, metavar="N", help="GPUs of a node (model; default: 8)")
    times.add_argument("--rejoin", metavar="TIME", help="how long a node is away (default: for good)")
    add_slow_options(parser.add_argument_group("slow nodes"))
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--hours", type=float, metavar="H", help="how long the trace lasts")
    length.add_argument("--days", type=float, metavar="D", help="the same in days")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="another one makes another trace (default: 1)")
    add_file_options(parser, out="where the trace goes (default: it is printed)")


def _add_show_parser(actions: Subparsers) -> None:
    summary = "summarize a trace, and draw how many nodes are live"
    description = "Summarize a trace, and draw how many nodes are live over time."
    parser = add_command(actions, "show", run_trace_show, summary, description, _SHOW_EXAMPLES)
    parser.add_argument("trace", type=Path, metavar="TRACE", help="the trace file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead; times in µs")
    add_file_options(parser, png="write a PNG picture")
    add_width_option(parser)


def run_trace_make(args: argparse.Namespace) -> None:
    """Print the trace, or write it and print its summary."""
    refuse_unwritable(args.out)
    trace, comments = _make_trace(args), [_command(args)]
    if args.out is None:
        print(trace.dumps(comments), end="")
    else:
        trace.save(args.out, comments)
        print("\n".join([*_summary(trace), f"written   {args.out}  (recycle trace show {args.out})"]))


def _make_trace(args: argparse.Namespace) -> Trace:
    _refuse_other_options(args)
    nodes, end_us = _nodes(args), _end_us(args)
    return _failures(args, nodes, end_us).with_slowdowns(read_slowdowns(args, nodes, end_us))


def _failures(args: argparse.Namespace, nodes: tuple[str, ...], end_us: int) -> Trace:
    rejoin_us = None if args.rejoin is None else parse_duration_us(args.rejoin)
    if args.kind == "none":
        if rejoin_us is not None:
            raise UserError("--rejoin says when failed nodes return, but with --kind none no node fails: leave it out")
        return failure_traces.quiet_trace(nodes, end_us)
    if args.kind == "model":
        if rejoin_us is not None:
            raise UserError("a failure model says itself when failed nodes are back: leave --rejoin out, or write repair=12h")
        model, num_gpus = parse_failure_model(args.failures), 8 if args.gpus is None else args.gpus
        return failure_traces.model_trace(model, nodes, num_gpus, end_us, args.seed)
    if args.kind == "bursts":
        most = max(1, len(nodes) // 4) if args.burst is None else parse_share_or_count(args.burst, len(nodes))
        return failure_traces.burst_trace(nodes, most, parse_duration_us(args.interval), end_us, args.seed, rejoin_us)
    if args.kind == "racks":
        return failure_traces.rack_trace(nodes, args.rack, parse_duration_us(args.mtbf), end_us, args.seed, rejoin_us)
    make = failure_traces.periodic_trace if args.kind == "every" else failure_traces.poisson_trace
    return make(nodes, parse_duration_us(args.interval or args.mtbf), end_us, args.seed, rejoin_us)


def _refuse_other_options(args: argparse.Namespace) -> None:
    """Raise if the kind lacks an option that it needs, or an option is given that it does not have."""
    takes = _OPTIONS_OF_KIND[args.kind]
    for option, example in _EXAMPLE_OF_OPTION.items():
        is_given = getattr(args, option) is not None
        if option in takes and not is_given and option not in _NOT_NEEDED:
            raise UserError(f"--kind {args.kind} needs --{option}: give it, such as --{option} {example}")
        if option not in takes and is_given:
            wanted = " and ".join(f"--{name}" for name in takes) or "none of them"
            raise UserError(f"--{option} means nothing for --kind {args.kind}, which takes {wanted}: leave it out")


def _nodes(args: argparse.Namespace) -> tuple[str, ...]:
    shape = (args.pipelines, args.stages)
    if args.nodes is not None and shape == (None, None):
        return failure_traces.node_names(args.nodes)
    if args.nodes is None and None not in shape:
        return failure_traces.worker_names(*shape)
    raise UserError("give the nodes once: either --pipelines D and --stages S, or --nodes N")


def _end_us(args: argparse.Namespace) -> int:
    option, number, unit_ms = ("hours", args.hours, 3_600_000) if args.days is None else ("days", args.days, 86_400_000)
    length_ms = float(number) * unit_ms
    if not 1 <= length_ms <= failure_traces.LONGEST_US // 1000:  # also refuses NaN
        raise UserError(f"--{option} is {number:g}, but a trace lasts from 1 ms to 30 years: give a number such as 6")
    return round(length_ms) * 1000


def _command(args: argparse.Namespace) -> str:
    """The command that makes the same trace, as a comment in the file."""
    failures = ("kind", "pipelines", "stages", "nodes", "interval", "mtbf", "burst", "rack", "failures", "gpus", "rejoin")
    names = (*failures, *SLOW_OPTIONS, "hours", "days", "seed")
    given = {name.replace("_", "-"): value for name in names if (value := getattr(args, name)) is not None}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value).removesuffix(".0"))]
    return shlex.join(["recycle", "trace", "make", *words])


def run_trace_show(args: argparse.Namespace) -> None:
    console = Terminal()
    width = chosen_width(args.width, console)
    trace = Trace.load(args.trace)
    if args.png:
        write_bytes(args.png, draw_trace_png(trace, args.trace.name))
    if args.json:
        print(json.dumps(_facts(trace)))
        return
    print("\n".join(_summary(trace)) + "\n")
    print_lines(draw_strip(trace, width, console.options.ascii_only), console)
    if args.png:
        print(f"wrote {args.png}")


def _facts(trace: Trace) -> dict[str, Any]:
    """The JSON object of `--json`. Each node that leaves is one failure, also if others leave at the same time."""
    steps = list(live_counts(trace))
    lived_us = sum(count * (after - at) for (at, count), (after, _) in pairwise([*steps, (trace.end_us, 0)]))
    failures = trace.num_failures
    return {
        "num_initial": len(trace.initial),
        "num_nodes": len({change.node for change in trace.changes}),
        "num_failures": failures,
        "num_hangs": trace.num_hangs,
        "num_joins": sum(change.joins for change in trace.later),
        "fewest_live": min(count for _, count in steps),
        "most_live": max(count for _, count in steps),
        "mean_live": lived_us / trace.end_us,
        "num_slow": sum(not slow.is_link for slow in trace.slowdowns),
        "num_slow_links": sum(slow.is_link for slow in trace.slowdowns),
        "end_us": trace.end_us,
        "mean_between_failures_us": round(trace.end_us / failures) if failures else None,
        "mean_between_failures_of_a_node_us": round(lived_us / failures) if failures else None,
    }


def _summary(trace: Trace) -> list[str]:
    facts = _facts(trace)
    failures = f"{facts['num_failures']:,}"
    if facts["num_failures"]:
        failures += f", one every {format_duration(facts['mean_between_failures_us'])}"
        failures += f"; a node lives {format_duration(facts['mean_between_failures_of_a_node_us'])} on average"
    if facts["num_hangs"]:
        failures += f"; {facts['num_hangs']:,} of them hang"
    slow = f"slow      {facts['num_slow']:,} times a node, {facts['num_slow_links']:,} times a link"
    return [
        f"nodes     {facts['num_initial']:,} at the start, {facts['num_nodes']:,} in all",
        f"failures  {failures}",
        f"joins     {facts['num_joins']:,} after the start",
        f"live      {facts['fewest_live']:,} to {facts['most_live']:,}, {facts['mean_live']:,.1f} on average",
        *([slow] if trace.slowdowns else []),
        f"end       {format_duration(trace.end_us)}",
    ]
