"""`recycle simulate`: the throughput of ReCycle and of other training systems under a failure trace."""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

from recycle.cli import arguments
from recycle.cli.simulation.seed_output import seed_json, seed_text
from recycle.cli.simulation.slow_options import SLOW_OPTIONS, add_slow_options, read_slowdowns
from recycle.cli.terminal import progress_bar
from recycle.core.cluster import Shape
from recycle.core.errors import UserError
from recycle.core.events.record import Event, Started
from recycle.core.events.record_file import write_record
from recycle.core.events.trace import Trace
from recycle.core.files import refuse_other_suffix, refuse_unwritable, write_bytes
from recycle.core.units import format_duration, parse_duration_us
from recycle.report.record.metrics import Metrics, measure
from recycle.report.record.tables import aligned, campaign_table, down_notes, pause_table
from recycle.sim import failure_traces
from recycle.sim.campaign.campaign import Case, run_cases
from recycle.sim.campaign.fault_free_rates import FaultFreeRates, fault_free_rates
from recycle.sim.job import SimulatedJob
from recycle.sim.systems.constants import Constants
from recycle.sim.systems.registry import SYSTEMS, SystemContext, parse_systems

_EXAMPLES = f"""\
systems: {", ".join(SYSTEMS)}

examples:
  a worker dies every half hour and none returns
    recycle simulate --model gpt3-6.7b --gpu a100-80 --pipelines 4 --stages 8 --microbatches 32 --interval 30m --hours 6
  each comes back after an hour; a picture of it
    recycle simulate --model gpt3-6.7b --gpu a100-80 --pipelines 4 --stages 8 --microbatches 32 --interval 30m --rejoin 1h \\
      --hours 24 --plot out.png
  your own trace (milliseconds,add|remove,node), and another pause for one system
    recycle simulate --model 145.6b --gpu h100 --tensor-parallel 8 --pipelines 12 --stages 16 --microbatches 64 \\
      --trace trace.csv --set oobleck.reconfigure=57s --json
  a Llama model with long sequences, each of which eight GPUs divide
    recycle simulate --model llama-3-8b,sequence=65536 --gpu h200 --context-parallel 8 --pipelines 4 --stages 4 \\
      --microbatches 16 --mtbf 30d --rejoin 2h --hours 24
  elastic cuts beside re-routing and whole layers that move, while workers and links are slow as often as published
    recycle simulate --model gpt3-6.7b --gpu a100-80 --pipelines 4 --stages 8 --microbatches 32 --slow published \\
      --slow-links published --systems recycle,recycle-rerouting,elaswave,resihp,odyssey --hours 24
  ten random months, with means and 90 % intervals
    recycle simulate --model gpt-76.1b,microbatch=4 --gpu h100 --tensor-parallel 8 --pipelines 16 --stages 8 --microbatches 28 \\
      --mtbf 264d --rejoin 24h --hours 720 --seeds 10 --systems recycle,replica-drop-zb,checkpoint-restart-spare-zb
  nobody fails, and the fault-free job is as fast as a measured one
    recycle simulate --model gpt3-6.7b --gpu a100-80 --pipelines 4 --stages 8 --microbatches 32 --fault-free 5.33"""


def add_simulate_parser(subparsers: arguments.Subparsers) -> None:
    summary = "compare systems under failures, at any scale"
    description = "Compare the throughput of ReCycle and of other systems while workers fail and return."
    parser = arguments.add_command(subparsers, "simulate", run_simulate, summary, description, _EXAMPLES)
    job = parser.add_argument_group("the job")
    job.add_argument("--model", required=True, help="a model by name or by its numbers; see 'recycle estimate --help'")
    job.add_argument("--gpu", required=True, help="a GPU by name or by its numbers")
    arguments.add_shape_options(job)
    job.add_argument("--tensor-parallel", type=int, default=1, metavar="T", help="GPUs of a worker (default: 1)")
    about = "groups of such GPUs in a worker that divide every sequence (default: 1)"
    job.add_argument("--context-parallel", type=int, default=1, metavar="C", help=about)
    shared = "layers that neighbouring stages of ReCycle share, for elastic cuts (default: auto, the best of 0 to 2)"
    job.add_argument("--shared-layers", default="auto", metavar="K", help=shared)
    parser.add_argument("--systems", default="all", metavar="LIST", help="which systems, separated by commas (default: all)")
    changes = parser.add_argument_group("failures")
    changes.add_argument("--interval", metavar="TIME", help="one worker at random fails every so often: 30m, 2h")
    changes.add_argument("--mtbf", metavar="TIME", help="or each worker fails at random, once in so long on average: 90d")
    changes.add_argument("--rejoin", metavar="TIME", help="a failed worker comes back after so long (default: never)")
    arguments.add_file_options(changes, trace="or a trace, as 'recycle trace make' writes it")
    add_slow_options(changes)
    changes.add_argument("--hours", type=float, metavar="H", help="how long (default: 6, or as long as the trace)")
    changes.add_argument("--seed", type=int, default=1, help="which workers fail (default: 1)")
    about = "simulate N seeds, from that one on: means with 90 %% intervals (default: 1)"
    changes.add_argument("--seeds", type=int, default=1, metavar="N", help=about)
    assumptions = parser.add_argument_group("assumptions")
    arguments.add_file_options(assumptions, constants="TOML with pauses and checkpoints, a table a system")
    arguments.add_set_option(assumptions, "one of them, such as oobleck.reconfigure=57s")
    add_cache_options(assumptions)
    about = "measured fault-free 1F1B throughput, to scale the estimate to"
    assumptions.add_argument("--fault-free", type=float, metavar="SAMPLES/S", help=about)
    output = parser.add_argument_group("output")
    arguments.add_file_options(output, plot="a PNG of throughput over time")
    output.add_argument("--records", type=Path, metavar="FOLDER", help="the record of every system, as lines of JSON")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def add_cache_options(options: argparse._ActionsContainer) -> None:
    """Add the options that `cache_folder` reads."""
    about = "where plans and results are kept (default: the user's cache)"
    options.add_argument("--cache", type=Path, metavar="FOLDER", help=about)
    options.add_argument("--no-cache", action="store_true", help="keep nothing")


def run_simulate(args: argparse.Namespace) -> None:
    names = parse_systems(args.systems)
    context = make_context(args)
    traces = [_trace(argparse.Namespace(**{**vars(args), "seed": seed}), context.job) for seed in _seeds(args)]
    refuse_unwritable(args.plot, args.records / "record.jsonl" if args.records else None)
    if args.plot:
        refuse_other_suffix(args.plot, ".png")
    cases = [Case(name, context, trace) for trace in traces for name in names]
    with progress_bar() as progress:
        task = progress.add_task("planning and simulating", total=len(cases))
        found = run_cases(cases, lambda done: progress.update(task, completed=done))
        rates = fault_free_rates(context, names)
    records = {name: found[number :: len(names)] for number, name in enumerate(names)}
    _write(args, records, context, rates.one_f_one_b)
    runs = {name: [measure(record) for record in own] for name, own in records.items()}
    print(_json(args, context, traces, rates, runs) if args.json else _text(args, context, traces, rates, runs))


def _seeds(args: argparse.Namespace) -> range:
    if not 1 <= args.seeds <= 10_000:
        raise UserError(f"--seeds is {args.seeds}, but it is a number of seeds from 1 to 10,000")
    if args.seeds > 1 and args.trace:
        raise UserError("a trace is not random: leave --seeds out")
    return range(args.seed, args.seed + args.seeds)


def make_context(args: argparse.Namespace) -> SystemContext:
    shape = Shape(args.pipelines, args.stages, args.microbatches)
    job = SimulatedJob.of(args.model, args.gpu, shape, args.tensor_parallel, context_parallel=args.context_parallel)
    constants = Constants.for_model(job.model.num_parameters)
    if args.constants:
        constants = constants.with_file(args.constants)
    context = SystemContext(job, constants.with_values(args.set), cache_folder(args), shared_layers=_shared_layers(args, job))
    wanted = args.fault_free
    if wanted is None:
        return context
    if not 1e-9 <= wanted <= 1e12:
        raise UserError(f"--fault-free is {wanted}, but it must be a number of samples a second above 0")
    estimated = fault_free_throughput(context)
    scaled = replace(context, job=replace(job, scale=estimated / wanted))
    # Times are whole microseconds, so that a very short step cannot be scaled exactly.
    if estimated / wanted > 1e6 or abs(fault_free_throughput(scaled) / wanted - 1) > 0.01:
        raise UserError(f"--fault-free is {wanted:g}, but the estimate is {estimated:.4g} samples a second: that cannot be meant")
    return scaled


def _shared_layers(args: argparse.Namespace, job: SimulatedJob) -> int | None:
    text = args.shared_layers.strip()
    if text == "auto":
        return None
    if not text.isdecimal() or len(text) > 9:
        raise UserError(f"--shared-layers is {text!r}, but it is a whole number of layers from 0 on, or auto")
    job.problem(shared_layers=int(text))  # refuses more layers than a stage has, or than fit in the memory
    return int(text)


def fault_free_throughput(context: SystemContext) -> float:
    return context.job.samples_per_step * 1e6 / context.job.scaled_us(context.baseline.period_us)


def cache_folder(args: argparse.Namespace) -> Path | None:
    """The folder of --cache, or the user's cache folder; None with --no-cache."""
    if args.no_cache:
        return None
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder: Path = args.cache or user_cache / "recycle"
    refuse_unwritable(folder / "timings.json")
    return folder


def _trace(args: argparse.Namespace, job: SimulatedJob) -> Trace:
    if sum(given is not None for given in (args.interval, args.mtbf, args.trace)) > 1:
        raise UserError("--interval, --mtbf and --trace say the same thing: give one of them")
    if args.hours is not None and not 0 < args.hours <= 24 * 3650:
        raise UserError(f"--hours is {args.hours}, but it must be above 0 and at most ten years")
    if args.trace:
        if args.rejoin is not None:
            raise UserError("a trace says itself who returns when: leave --rejoin out")
        if any(getattr(args, option) is not None for option in SLOW_OPTIONS):
            raise UserError("a trace says itself who is slow when: leave --slow, --slow-links and --drift out")
        trace = Trace.load(args.trace)
        return trace if args.hours is None else trace.until(round(args.hours * 3.6e9))
    end_us = round((6 if args.hours is None else args.hours) * 3.6e9)
    nodes = failure_traces.worker_names(job.shape.num_pipelines, job.shape.num_stages)
    return _failures(args, nodes, end_us).with_slowdowns(read_slowdowns(args, nodes, end_us))


def _failures(args: argparse.Namespace, nodes: tuple[str, ...], end_us: int) -> Trace:
    rejoin_us = parse_duration_us(args.rejoin) if args.rejoin is not None else None
    if args.mtbf is not None:
        return failure_traces.poisson_trace(nodes, parse_duration_us(args.mtbf), end_us, args.seed, rejoin_us)
    if args.interval is None and args.rejoin is not None:
        raise UserError("--rejoin says when failed workers return, but none fails: give --interval or --mtbf, too")
    interval_us = parse_duration_us(args.interval) if args.interval is not None else end_us
    return failure_traces.periodic_trace(nodes, interval_us, end_us, args.seed, rejoin_us)


def _write(args: argparse.Namespace, records: dict[str, list[list[Event]]], context: SystemContext, fault_free: float) -> None:
    """Write the picture of the first seed, and the records of all."""
    if args.plot:
        # matplotlib takes half a second to import
        from recycle.report.figures.campaign_chart import draw_campaign

        first = {name: own[0] for name, own in records.items()}
        write_bytes(args.plot, draw_campaign(first, _title(context.job), fault_free))
    if args.records:
        for name, own in records.items():
            for seed, record in zip(_seeds(args), own, strict=True):
                path = args.records / (f"{name}.jsonl" if args.seeds == 1 else f"{name}-seed{seed}.jsonl")
                write_record(path, [Started("simulate", f"{name}: {_title(context.job)}"), *record])


def _title(job: SimulatedJob) -> str:
    shape = job.shape
    num_gpus = job.tensor_parallel * job.context_parallel
    gpus = f" x {num_gpus} GPUs" if num_gpus > 1 else ""
    return (
        f"{job.model.name} on {shape.num_workers}{gpus} {job.gpu.name}: {shape.num_pipelines} pipelines × "
        f"{shape.num_stages} stages, {shape.num_microbatches} micro-batches each"
    )


def _json(
    args: argparse.Namespace, context: SystemContext, traces: list[Trace], rates: FaultFreeRates, runs: dict[str, list[Metrics]]
) -> str:
    job, trace = context.job, traces[0]
    facts = {
        "model": job.model.name,
        "gpu": job.gpu.name,
        "nodes": job.num_nodes,
        "samples_per_step": job.samples_per_step,
        "fault_free": round(rates.one_f_one_b, 6),
        "best_fault_free": round(rates.best, 6),
        "best_schedule": rates.best_schedule,
        "hours": trace.end_us / 3.6e9,
        "failures": trace.num_failures,
        "slowdowns": len(trace.slowdowns),
        "seed": None if args.trace else args.seed,
    }
    if args.seeds > 1:
        counts = {"failures": [one.num_failures for one in traces], "slowdowns": [len(one.slowdowns) for one in traces]}
        return json.dumps({**facts, **counts, "seeds": args.seeds, "systems": seed_json(runs, rates)})
    systems = {name: {**run.to_json(), **_shares(name, run, rates)} for name, (run,) in runs.items()}
    return json.dumps({**facts, "systems": systems})


def _shares(system: str, run: Metrics, rates: FaultFreeRates) -> dict[str, float | None]:
    own_share = rates.own_share(system, run.throughput)
    return {
        "goodput": round(run.goodput(rates.one_f_one_b), 6),
        "own_fault_free": round(rates.own[system], 6),
        "own_share": None if own_share is None else round(own_share, 6),
        "best_share": round(rates.best_share(run.throughput), 6),
    }


def _text(
    args: argparse.Namespace, context: SystemContext, traces: list[Trace], rates: FaultFreeRates, runs: dict[str, list[Metrics]]
) -> str:
    baseline = f"fault-free 1F1B {rates.one_f_one_b:.4g} samples/s, {context.job.samples_per_step} samples a step"
    lines = [
        _title(context.job),
        f"{_counts(traces[0])}; {baseline}" if args.seeds == 1 else baseline,
        f"best fault-free schedule {rates.best:.4g} samples/s ({rates.best_schedule})",
        "shares: of fault-free 1F1B, of the system's own throughput without failures, of the best fault-free schedule",
    ]
    lines += seed_text(runs, rates) if args.seeds > 1 else _one_seed({name: run for name, (run,) in runs.items()}, rates)
    if args.plot:
        lines += ["", f"wrote {args.plot}{f', of seed {args.seed}' if args.seeds > 1 else ''}"]
    return "\n".join(lines)


def _counts(trace: Trace) -> str:
    num_joins = len(trace.later) - trace.num_failures
    counts = f"{format_duration(trace.end_us)}, failures: {trace.num_failures}, joins: {num_joins}"
    return f"{counts}, slow: {len(trace.slowdowns)}" if trace.slowdowns else counts


def _one_seed(metrics: dict[str, Metrics], rates: FaultFreeRates) -> list[str]:
    lines = ["", aligned(campaign_table(metrics, rates.one_f_one_b, rates.own, rates.best))]
    if causes := pause_table(metrics):
        lines += ["", aligned(causes)]
    if notes := down_notes(metrics):
        lines += ["", *notes]
    return lines
