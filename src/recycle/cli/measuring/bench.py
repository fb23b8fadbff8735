"""`recycle bench cluster`: measure on this machine whether plans come true, from a profile to a page with pictures."""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

from recycle.cli.measuring.profile_text import crowding
from recycle.core.errors import UserError
from recycle.core.profile import Profile
from recycle.evaluate.hardware import DEFAULT_ITERATIONS, DEFAULT_KILLS, DEFAULT_ROUNDS

_PARTS = ("profile", "plan", "race", "deaths", "report")
_EXAMPLES = """\
parts, in this order; what is done already is not done again:
  profile  rehearse with all workers at once: what ops, messages, reductions and steps cost
  plan     a plan for every variant, and for whoever may die
  race     all variants in turns by the same processes, and torch's schedules beside them
  deaths   kill workers one after the other while they train, and start them again
  report   tables and pictures: results.md, results.json, throughput.png, timeline.svg

examples:
  recycle bench cluster --workers 12 --backend cpu-cores --out build/cores
  recycle bench cluster --workers 12 --backend gpu-slices --out build/slices      one NVIDIA GPU, shared by all
  recycle bench cluster --small --rounds 4 --out build/laptop                     on two cores in ten minutes
  recycle bench cluster --out build/cores --only report                           once more, from what is there

On a machine that has torch and nothing else, PYTHONPATH=src python -m recycle.evaluate.hardware
does the parts that need its hardware."""


def add_bench_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure on this machine whether plans come true",
        description="Measure schedules side by side with real workers that compute at the same time.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("cluster",), help="what is measured")
    parser.add_argument("--workers", type=int, metavar="N", help="workers, a multiple of 4 (default: 12)")
    parser.add_argument("--backend", metavar="cpu-cores|gpu-slices", help="what they compute on (default: cpu-cores)")
    parser.add_argument("--small", action="store_true", help="a GPT that is small enough for workers that share cores")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where everything goes, and goes on from")
    parser.add_argument("--only", default=",".join(_PARTS), metavar="LIST", help=f"some of {','.join(_PARTS)} (default: all)")
    parser.add_argument(
        "--rounds", type=int, default=DEFAULT_ROUNDS, metavar="N", help="turns of each variant (default: %(default)s)"
    )
    parser.add_argument(
        "--iterations",
        type=int,
        default=DEFAULT_ITERATIONS,
        metavar="N",
        help="iterations of a turn that count (default: %(default)s)",
    )
    parser.add_argument("--kills", type=int, default=DEFAULT_KILLS, metavar="N", help="workers to kill (default: %(default)s)")
    parser.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    # Here, because they load torch, and only this command needs it.
    try:
        from recycle.evaluate.hardware import evaluation_folder as folder
        from recycle.evaluate.hardware.setup import CPU_CORES, Setup
        from recycle.evaluate.hardware.variants import variants
        from recycle.evaluate.results.cluster_page import PICTURE, RESULTS, write_results
        from recycle.evaluate.results.variant_plans import make_plans
        from recycle.profiling.machine import num_cores
    except ImportError as problem:
        raise UserError(f"measuring needs torch ({problem}): install it with pip install 'recycle-train[train]'") from None
    parts = _parts(args.only)
    for name in ("rounds", "iterations", "kills"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}, but it must be at least 1")
    if (args.out / folder.SETUP).exists() and args.backend is None and args.workers is None and not args.small:
        setup = folder.read_setup(args.out)
    else:
        setup = Setup.usual(args.backend or CPU_CORES, 12 if args.workers is None else args.workers, args.small)
    if "profile" not in parts and set(parts) & {"plan", "report"} and not (args.out / folder.PROFILE).exists():
        raise UserError(f"there is no profile in {args.out} to plan from or to report on: run the part profile first")
    folder.begin_evaluation(args.out, setup)
    chosen = variants(setup)
    with folder.hardware(setup) if set(parts) & {"profile", "race", "deaths"} else nullcontext():
        if "race" in parts and not setup.is_gpu and (note := crowding(setup.num_workers, num_cores())):
            _say(note)
        if "profile" in parts:
            folder.measure_profile(args.out, setup, _say)
        if "plan" in parts:
            make_plans(args.out, setup, chosen, Profile.load(args.out / folder.PROFILE), _say)
        if "race" in parts:
            folder.measure_race(args.out, setup, args.rounds, args.iterations, _say)
        if "deaths" in parts:
            folder.measure_deaths(args.out, setup, args.kills, _say)
    if "report" in parts:
        command = f"recycle bench cluster --workers {setup.num_workers} --backend {setup.backend}{' --small' * setup.is_small}"
        print(write_results(args.out, setup, chosen, Profile.load(args.out / folder.PROFILE), command))
        _say(f"wrote {args.out / RESULTS}.md and {args.out / PICTURE}")
    return 0


def _parts(only: str) -> list[str]:
    chosen = [part.strip() for part in only.split(",") if part.strip()]
    if unknown := [part for part in chosen if part not in _PARTS]:
        raise UserError(f"--only names {unknown[0]!r}, but the parts are {', '.join(_PARTS)}")
    return chosen


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
