"""`recycle advise`: which system in which shape, with how many spares, for a cluster and its failures."""

import argparse
import json
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from recycle.cli import arguments
from recycle.cli.simulation.advise_text import advice_page, choice_name, title_of
from recycle.cli.simulation.constants_options import add_constants_options, constants_from_options, constants_note
from recycle.cli.simulation.failure_options import FAILURE_MODELS_HELP
from recycle.cli.simulation.job_options import add_model_options, read_model_and_gpu
from recycle.cli.simulation.simulate import add_cache_options, cache_folder
from recycle.cli.terminal import progress_bar
from recycle.core.errors import UserError
from recycle.core.files import refuse_unwritable, write_bytes, write_text
from recycle.core.units import parse_duration_us
from recycle.report.record.prices import cost_per_million, refuse_price
from recycle.sim.advise.advice import Advice, advise
from recycle.sim.advise.choices import NOT_TO_CHOOSE
from recycle.sim.advise.question import SCREENED_FAILURES, ClusterQuestion, screened_days
from recycle.sim.advise.verdict import FAILURES
from recycle.sim.failure_model import FAILURE_MODELS, FailureModel, parse_failure_model
from recycle.sim.systems.registry import SYSTEMS, parse_systems

DEFAULT_DAYS = 30.0
# A CUDA context and the buffers of NCCL take some GiB of 80, and the allocator cannot use every gap.
DEFAULT_RESERVE = 0.05
NAMES = ("advice.md", "advice.json", "advice.png")
_EXAMPLES = f"""\
systems that can be chosen: {", ".join(name for name in SYSTEMS if name not in NOT_TO_CHOOSE)}

{FAILURE_MODELS_HELP}
Whatever fails, its server is away as a whole until the repair.

examples:
  which shape, system and spares for 64 A100, if a server of 8 fails once in 264 days and is back after a day
    recycle advise --model gpt3-6.7b --gpu a100-80 --gpus 64 --batch 512 --mtbf 264d --repair 1d
  1,024 H100 at a price, with a page, its numbers and a picture
    recycle advise --model gpt-145.6b --gpu h100 --gpus 1024 --batch 1024 --mtbf 264d --repair 1d --gpu-price 2.5 --out advice
  servers that fail four times as often, and Oobleck's pause as others measured it
    recycle advise --model gpt-145.6b --gpu h100 --gpus 1024 --batch 1024 --mtbf 66d --repair 1d --set oobleck.reconfigure=57s
  failures as often as when Llama 3 was trained
    recycle advise --model llama-3-70b --gpu h100 --gpus 1024 --batch 1024 --failures llama3
  your own model by its measured profile, on 32 devices of 80 GiB
    recycle advise --profile profile.json --memory 80GiB --gpus 32 --batch 256 --mtbf 30d --repair 4h"""


def add_advise_parser(subparsers: arguments.Subparsers) -> None:
    summary = "choose system, shape and spares for a cluster"
    description = (
        "Say which system in which shape, with how many spares, trains fastest on a cluster whose servers fail and come back:\n"
        "pipelines, stages, tensor-parallel degree, micro-batches and memory, the expected throughput with its interval, the\n"
        "closest alternatives, and what would change the verdict. An interrupted call goes on where it stopped."
    )
    parser = arguments.add_command(subparsers, "advise", run_advise, summary, description, _EXAMPLES)
    job = parser.add_argument_group("the job")
    add_model_options(job)
    job.add_argument("--gpus", type=int, required=True, metavar="N", help="all GPUs, those of spare servers among them")
    job.add_argument("--gpus-per-server", type=int, default=8, metavar="N", help="GPUs that fail together (default: 8)")
    job.add_argument("--batch", type=int, required=True, metavar="SAMPLES", help="samples of a step")
    about = "how far a shape's batch may be off, as a share (default: 0.02)"
    job.add_argument("--batch-tolerance", type=float, default=0.02, metavar="SHARE", help=about)
    about = "groups of a worker's GPUs that divide every sequence (default: 1)"
    job.add_argument("--context-parallel", type=int, metavar="C", help=about)
    failures = parser.add_argument_group("failures")
    failures.add_argument("--mtbf", metavar="TIME", help="a server fails once in so long on average: 264d")
    failures.add_argument("--repair", metavar="TIME", help="a failed server is back after so long: 24h")
    about = f"instead of both: failures and repairs as published, see below: {', '.join(FAILURE_MODELS)}"
    failures.add_argument("--failures", metavar="MODEL", help=about)
    about = f"how long is simulated (default: 30, or until {SCREENED_FAILURES} failures are expected if that is sooner)"
    failures.add_argument("--days", type=float, metavar="D", help=about)
    failures.add_argument("--seeds", type=int, default=10, metavar="N", help="how often, with other failures (default: 10)")
    assumptions = parser.add_argument_group("assumptions")
    assumptions.add_argument("--systems", default="all", metavar="LIST", help="which may be chosen, separated by commas")
    about = f"the share of a GPU's memory that is kept free, for what estimates do not know (default: {DEFAULT_RESERVE})"
    assumptions.add_argument("--memory-reserve", type=float, default=DEFAULT_RESERVE, metavar="SHARE", help=about)
    add_constants_options(assumptions)
    about = "what a GPU costs an hour, spare or not: gives the cost of a million tokens, or samples"
    assumptions.add_argument("--gpu-price", type=float, metavar="PRICE", help=about)
    add_cache_options(assumptions)
    output = parser.add_argument_group("output")
    output.add_argument("--out", type=arguments.output_path, metavar="FOLDER", help=f"write {', '.join(NAMES)} there")
    output.add_argument("--json", action="store_true", help="print JSON instead of Markdown")


def run_advise(args: argparse.Namespace) -> None:
    question = _question(args)
    if args.gpu_price is not None:
        refuse_price(args.gpu_price)
    if args.out:
        refuse_unwritable(*(args.out / name for name in NAMES))
    with progress_bar() as progress, ExitStack() as stack:
        # Processes find the plans of each other in the folder, also if nothing is to be kept.
        folder = cache_folder(args) or Path(stack.enter_context(TemporaryDirectory(prefix="recycle-advise-")))
        task = progress.add_task("listing choices", total=None)
        advice = advise(question, folder, lambda doing, done: progress.update(task, description=doing, completed=done))
    command = shlex.join(["recycle", *sys.argv[1:]])
    facts = _facts(advice, args.gpu_price)
    measured = [note] if (note := constants_note(args, args.gpus)) else []
    if args.out:
        write_text(args.out / "advice.md", advice_page(advice, command, args.gpu_price, "advice.png", measured))
        write_text(args.out / "advice.json", json.dumps(facts, indent=1) + "\n")
        write_bytes(args.out / "advice.png", _picture(advice))
    print(json.dumps(facts) if args.json else advice_page(advice, command, args.gpu_price, notes=measured).rstrip("\n"))


def _question(args: argparse.Namespace) -> ClusterQuestion:
    model, gpu = read_model_and_gpu(args)
    mtbf_us, repair_us, failures = _failures(args)
    return ClusterQuestion(
        model,
        gpu,
        args.gpus,
        args.batch,
        mtbf_us,
        repair_us,
        constants_from_options(args, model.num_parameters, args.gpus),
        _systems(args.systems),
        args.gpus_per_server,
        _days(args, mtbf_us, repair_us) if args.days is None else args.days,
        args.seeds,
        args.batch_tolerance,
        1 if args.context_parallel is None else args.context_parallel,
        args.memory_reserve,
        failures,
    )


def _failures(args: argparse.Namespace) -> tuple[int, int, FailureModel | None]:
    """How often a server fails, how long it is away, and the failure model that says so, if there is one."""
    if args.failures is None:
        for option in ("mtbf", "repair"):
            if getattr(args, option) is None:
                raise UserError(f"--{option} is missing: give --mtbf and --repair of a server, or --failures")
        return parse_duration_us(args.mtbf), parse_duration_us(args.repair), None
    for option in ("mtbf", "repair"):
        if getattr(args, option) is not None:
            raise UserError(f"--{option} and --failures both say how servers fail: leave one out, or write llama3,repair=12h")
    model = parse_failure_model(args.failures)
    return model.mtbf_us(max(1, args.gpus_per_server)), model.mean_repair_us, model


def _days(args: argparse.Namespace, mtbf_us: int, repair_us: int) -> float:
    """In a large cluster a few days have failures enough."""
    num_servers = max(1, args.gpus // max(1, args.gpus_per_server))
    return min(DEFAULT_DAYS, screened_days(num_servers, mtbf_us, repair_us))


def _systems(text: str) -> tuple[str, ...]:
    names = parse_systems(text)
    if text.strip() == "all":
        return tuple(name for name in names if name not in NOT_TO_CHOOSE)
    for name in names:
        if name in NOT_TO_CHOOSE:
            raise UserError(f"{name} is no system that can be chosen: it is a bound, or has what nobody has; leave it out")
    return tuple(names)


def _facts(advice: Advice, price: float | None) -> dict[str, object]:
    facts: dict[str, object] = advice.to_json()
    if price is not None:
        shown = (advice.first, *advice.alternatives)
        costs = [[cost_per_million(rate, advice.question.num_gpus, price) for rate in advice.rates(one)] for one in shown]
        means = [mean for mean, _, _ in costs]
        intervals = [(cheapest, dearest) for _, dearest, cheapest in costs]  # the highest throughput is the cheapest
        facts[f"cost_per_million_{advice.question.unit}"] = {
            "gpu_price": price,
            "first": means[0],
            "alternatives": means[1:],
            "first_interval_90": intervals[0],
            "alternatives_intervals_90": intervals[1:],
        }
    return facts


def _picture(advice: Advice) -> bytes:
    # matplotlib takes half a second to import
    from recycle.report.figures.advice_chart import AdviceBar, AdviceCurve, draw_advice

    million = advice.question.units_per_sample / 1e6
    best = [group.best for group in advice.found.groups.values() if group.best]
    bars = [
        AdviceBar(
            one.choice.system,
            f"{choice_name(one.choice)}{', spares' if one.choice.num_spare_servers else ''}",
            one.runs.mean * million,
            one.runs.half_width * million,
            one.fault_free * million,
        )
        for one in sorted(best, key=lambda one: -one.runs.mean)
    ]
    curves = [
        AdviceCurve(choice.system, choice_name(choice), {factor: rate * million for factor, rate in points.items()})
        for choice, points in advice.sensitivity.curves[FAILURES].items()
    ]
    return draw_advice(title_of(advice), f"million {advice.question.unit} / s", bars, curves)
