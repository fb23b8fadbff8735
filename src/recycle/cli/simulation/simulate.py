"""`recycle simulate`: the throughput of ReCycle and of other training systems under a failure trace."""

import argparse
import json
import os
from dataclasses import astuple, replace
from pathlib import Path
from statistics import fmean

from recycle.cli import arguments
from recycle.cli.simulation.constants_options import (
    add_constants_options,
    constants_from_options,
    constants_note,
    constants_of_run,
)
from recycle.cli.simulation.failure_options import FAILURE_MODELS_HELP, add_failure_options, read_trace
from recycle.cli.simulation.job_options import add_job_options, profile_note, read_simulated_job
from recycle.cli.simulation.seed_output import seed_json, seed_text
from recycle.cli.terminal import progress_bar
from recycle.core.errors import UserError
from recycle.core.events.record import Event, Started
from recycle.core.events.record_file import write_record
from recycle.core.events.trace import Trace
from recycle.core.files import refuse_other_suffix, refuse_unwritable, write_bytes
from recycle.core.units import format_duration
from recycle.report.record.metrics import Metrics, measure
from recycle.report.record.prices import PaidRun, paid_table, refuse_price
from recycle.report.record.tables import aligned, campaign_table, down_notes, pause_table
from recycle.sim.campaign.campaign import Case, run_cases
from recycle.sim.campaign.fault_free_rates import FaultFreeRates, fault_free_rates
from recycle.sim.campaign.spares import paid_workers
from recycle.sim.job import SimulatedJob
from recycle.sim.shared_layer_choice import expected_dead
from recycle.sim.systems.registry import SYSTEMS, SystemContext, parse_systems

_EXAMPLES = f"""\
systems: {", ".join(SYSTEMS)}

{FAILURE_MODELS_HELP}

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
  failures as often as when Llama 3 was trained, four spare workers, and what a million tokens cost
    recycle simulate --model llama-3-70b --gpu h100 --tensor-parallel 8 --pipelines 16 --stages 8 --microbatches 32 \\
      --failures llama3 --spares 4 --gpu-price 2.50 --hours 720
  your own model by its measured profile, on devices of 80 GiB
    recycle simulate --profile profile.json --memory 80GiB --pipelines 8 --stages 4 --microbatches 16 --mtbf 30d --rejoin 2h
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
    add_job_options(job)
    shared = "layers that neighbouring stages of ReCycle share, for elastic cuts (default: auto, the best of 0 to 2)"
    job.add_argument("--shared-layers", default="auto", metavar="K", help=shared)
    parser.add_argument("--systems", default="all", metavar="LIST", help="which systems, separated by commas (default: all)")
    add_failure_options(parser.add_argument_group("failures"))
    assumptions = parser.add_argument_group("assumptions")
    add_constants_options(assumptions)
    add_cache_options(assumptions)
    about = "measured fault-free 1F1B throughput, to scale the estimate to"
    assumptions.add_argument("--fault-free", type=float, metavar="SAMPLES/S", help=about)
    about = "what a GPU costs an hour: gives the cost of a million tokens, spares among what is paid for"
    assumptions.add_argument("--gpu-price", type=float, metavar="PRICE", help=about)
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
    if args.gpu_price is not None:
        refuse_price(args.gpu_price)
    context = make_context(args)
    traces = [read_trace(argparse.Namespace(**{**vars(args), "seed": seed}), context.job) for seed in _seeds(args)]
    context = replace(context, num_dead=expected_dead(traces, context.job.num_nodes))
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
    job = read_simulated_job(args)
    constants = constants_from_options(args, job.model.num_parameters, job.num_nodes)
    context = SystemContext(job, constants, cache_folder(args), shared_layers=_shared_layers(args, job))
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


def _paid(args: argparse.Namespace, job: SimulatedJob, traces: list[Trace], runs: dict[str, list[Metrics]]) -> dict[str, PaidRun]:
    """What is paid for: the GPUs of all workers and spares, all the time; throughput is the mean over the seeds."""
    workers = {name: max(paid_workers(name, trace, job.num_nodes, args.spares) for trace in traces) for name in runs}
    return {
        name: PaidRun(
            fmean(run.throughput for run in seeds), workers[name] * job.gpus_per_worker, job.model.sequence, args.gpu_price
        )
        for name, seeds in runs.items()
    }


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
                shape = astuple(context.job.shape)
                write_record(path, [Started("simulate", f"{name}: {_title(context.job)}", shape), *record])


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
    job, trace, measured = context.job, traces[0], constants_of_run(args)
    paid = _paid(args, job, traces, runs)
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
        "failure_model": args.failures,
        "spares": args.spares,
        "measured_constants": measured.to_json(job.num_nodes) if measured else None,
    }
    if args.seeds > 1:
        counts = {"failures": [one.num_failures for one in traces], "slowdowns": [len(one.slowdowns) for one in traces]}
        return json.dumps(
            {
                **facts,
                **counts,
                "seeds": args.seeds,
                "paid": {name: one.to_json() for name, one in paid.items()},
                "systems": seed_json(runs, rates),
            }
        )
    systems = {
        name: {**run.to_json(), "paid": paid[name].to_json(), **_shares(name, run, rates)} for name, (run,) in runs.items()
    }
    return json.dumps({**facts, "systems": systems})


def _shares(system: str, run: Metrics, rates: FaultFreeRates) -> dict[str, float | None]:
    goodput = rates.goodput(system, run.throughput)
    return {
        "one_f_one_b_share": round(run.share_of(rates.one_f_one_b), 6),
        "own_fault_free": round(rates.own[system], 6),
        "goodput": None if goodput is None else round(goodput, 6),
        "best_share": round(rates.best_share(run.throughput), 6),
    }


def _text(
    args: argparse.Namespace, context: SystemContext, traces: list[Trace], rates: FaultFreeRates, runs: dict[str, list[Metrics]]
) -> str:
    baseline = f"fault-free 1F1B {rates.one_f_one_b:.4g} samples/s, {context.job.samples_per_step} samples a step"
    lines = [
        _title(context.job),
        *filter(None, (profile_note(context.job), constants_note(args, context.job.num_nodes))),
        f"{_counts(traces[0])}; {baseline}" if args.seeds == 1 else baseline,
        f"best fault-free schedule {rates.best:.4g} samples/s ({rates.best_schedule})",
        "shares: of fault-free 1F1B, of the system's own throughput without failures, of the best fault-free schedule",
    ]
    lines += seed_text(runs, rates) if args.seeds > 1 else _one_seed({name: run for name, (run,) in runs.items()}, rates)
    if args.spares or args.gpu_price is not None:
        lines += ["", aligned(paid_table(_paid(args, context.job, traces, runs)))]
    if args.plot:
        lines += ["", f"wrote {args.plot}{f', of seed {args.seed}' if args.seeds > 1 else ''}"]
    return "\n".join(lines)


def _counts(trace: Trace) -> str:
    num_joins = len(trace.later) - trace.num_failures
    counts = f"{format_duration(trace.end_us)}, failures: {trace.num_failures}, joins: {num_joins}"
    if trace.num_hangs:
        counts += f", hangs: {trace.num_hangs}"
    return f"{counts}, slow: {len(trace.slowdowns)}" if trace.slowdowns else counts


def _one_seed(metrics: dict[str, Metrics], rates: FaultFreeRates) -> list[str]:
    lines = ["", aligned(campaign_table(metrics, rates.one_f_one_b, rates.own, rates.best))]
    if causes := pause_table(metrics):
        lines += ["", aligned(causes)]
    if notes := down_notes(metrics):
        lines += ["", *notes]
    return lines
