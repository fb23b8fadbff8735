"""`recycle bench cluster`: measure on this machine whether plans take as long as predicted, and write a page of results."""

import argparse
import sys
from pathlib import Path

from recycle.cli.arguments import Subparsers, add_command, output_path
from recycle.core.errors import UserError
from recycle.evaluate.hardware.measurement_size import MeasurementSize, add_size_arguments

DEFAULT_OUT = Path("build/cluster")
_PARTS = ("profile", "plan", "race", "deaths", "report")
_EXAMPLES = f"""\
parts, in this order; a finished part is not repeated:
  profile  measure ops, messages, reductions and steps while all workers compute
  plan     a plan for every variant, and for every worker or pair that may be killed
  race     interleaved comparison: the same processes train by all variants in turn, torch's schedules among them
  deaths   kill workers one after the other while they train, and start them again
  report   tables and pictures: results.md, results.json, throughput.png, timeline.svg

examples:
  recycle bench cluster --small --rounds 4                                        on two cores in ten minutes, into {DEFAULT_OUT}
  recycle bench cluster --workers 12 --backend cpu-cores --out build/cores
  recycle bench cluster --workers 12 --backend gpu-slices --out build/slices      one NVIDIA GPU, shared by all
  recycle bench cluster --study elastic --microbatches 24 --out build/elastic     cuts beside re-routing; nobody is killed
  recycle bench cluster --backend paced-cores --study elastic --out build/paced   the same on cores that are not equally fast
  recycle bench cluster --backend emulated --study elastic --out build/emulated   the same on any machine
  recycle bench cluster --out build/cores --only report                           the report again, from the measurements

On a machine that has only torch and msgspec, PYTHONPATH=src python -m recycle.evaluate.hardware
runs the parts that need its hardware."""


def add_bench_parser(subparsers: Subparsers) -> None:
    summary = "measure on this machine whether plans take as long as predicted"
    description = "Compare schedules with real workers that compute at the same time."
    parser = add_command(subparsers, "bench", run_bench, summary, description, _EXAMPLES)
    parser.add_argument("what", choices=("cluster",), help="the benchmark")
    parser.add_argument("--workers", type=int, metavar="N", help="workers, a multiple of 4 (default: 12)")
    hardware = (
        "the hardware of a worker: cpu-cores (default) or gpu-slices; for --study elastic also paced-cores, whose ops last as "
        "long as on a slow core, or emulated, which needs two cores only"
    )
    parser.add_argument("--backend", metavar="BACKEND", help=hardware)
    parser.add_argument("--small", action="store_true", help="a GPT that is small enough for workers that share cores")
    parser.add_argument(
        "--study",
        metavar="techniques|elastic",
        help="compare the techniques with each other and with torch (default), or re-routing with cuts and with moved layers",
    )
    parser.add_argument("--variants", metavar="LIST", help="plan, race and report only some variants, by their names in plans/")
    parser.add_argument("--microbatches", type=int, metavar="N", help="micro-batches of each pipeline (default: 6)")
    about = f"the folder of measurements and results, new or to resume (default: {DEFAULT_OUT})"
    parser.add_argument("--out", type=output_path, metavar="FOLDER", help=about)
    parser.add_argument("--only", default=",".join(_PARTS), metavar="LIST", help=f"some of {','.join(_PARTS)} (default: all)")
    add_size_arguments(parser)


def run_bench(args: argparse.Namespace) -> None:
    # Imported here, because these modules load torch, and only this command needs it.
    try:
        from recycle.evaluate.cluster_benchmark import run_cluster_benchmark
        from recycle.evaluate.hardware.evaluation_folder import choose_setup
        from recycle.evaluate.hardware.variants import chosen_variants
    except ImportError as problem:
        raise UserError(
            f"measuring needs torch ({problem}): install it with pip install -e '.[train]' in a clone of ReCycle"
        ) from None
    parts = [part.strip() for part in args.only.split(",") if part.strip()]
    if unknown := [part for part in parts if part not in _PARTS]:
        raise UserError(f"--only names {unknown[0]!r}, but the parts are {', '.join(_PARTS)}")
    size, folder = MeasurementSize.from_arguments(args), args.out or DEFAULT_OUT
    setup = choose_setup(folder, args.backend, args.workers, args.small, args.study, args.microbatches)
    if args.out is None:
        _say(f"--out is not given: measurements and results are in {folder}")
    page = run_cluster_benchmark(folder, setup, parts, size, _say, chosen_variants(setup, args.variants))
    if page is not None:
        print(page)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
