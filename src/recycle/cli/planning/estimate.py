"""`recycle estimate`: compute a profile from the numbers of a model and a GPU, before anything is measured."""

import argparse
import json
from textwrap import fill

from recycle.cli.arguments import Subparsers, add_command, add_file_options
from recycle.core.files import refuse_unwritable, write_text
from recycle.core.profile import Profile
from recycle.core.units import format_bytes, format_us
from recycle.planner.profiles.catalog import GPUS, MODELS
from recycle.planner.profiles.estimate import estimate

_NAMES = fill(f"models: {', '.join(MODELS)}", width=120, subsequent_indent="  ", break_on_hyphens=False)
_EXAMPLES = f"""\
{_NAMES}
  or a name with changes: llama-3-8b,microbatch=2,sequence=4096
  or their numbers: layers=24,hidden=1024,heads=16,sequence=2048,vocabulary=51200,microbatch=1
    with RMSNorm, rotary positions, gated feed-forward: family=llama,...,kv_heads=8,head_dim=128,ffn=14336,tied=no
    with experts: family=llama,...,ffn=14336,experts=8,top_k=2,shared_experts=1
GPUs: {", ".join(GPUS)}
  or a name with changes: h100,efficiency=0.5

examples:
  recycle estimate --model gpt3-6.7b --gpu a100-80 --stages 8 --out profile.json
  recycle estimate --model 145.6b --gpu h100 --stages 16 --tensor-parallel 8
  recycle estimate --model llama-3-70b,sequence=131072 --gpu h200 --stages 8 --tensor-parallel 8 --context-parallel 16"""


def add_estimate_parser(subparsers: Subparsers) -> None:
    summary = "make a profile from model and GPU numbers"
    description = "Estimate what each op costs at each stage, in time and memory."
    parser = add_command(subparsers, "estimate", run_estimate, summary, description, _EXAMPLES)
    parser.add_argument("--model", required=True, help="a model by name or by its numbers")
    parser.add_argument("--gpu", required=True, help="a GPU by name or by its numbers")
    parser.add_argument("--stages", type=int, required=True, metavar="S", help="stages of a pipeline")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="T", help="GPUs that share a stage (default: 1)")
    about = "groups of such GPUs that divide every sequence (default: 1)"
    parser.add_argument("--context-parallel", type=int, default=1, metavar="C", help=about)
    add_file_options(parser, out="where the profile goes (default: it is only shown)")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON instead of a table")


def run_estimate(args: argparse.Namespace) -> None:
    refuse_unwritable(args.out)
    profile = estimate(args.model, args.gpu, args.stages, args.tensor_parallel, context_parallel=args.context_parallel)
    if args.out:
        write_text(args.out, json.dumps(profile.to_json(), indent=1) + "\n")
    print(json.dumps(profile.to_json()) if args.json else _table(profile))


def _table(profile: Profile) -> str:
    lines = [
        profile.name,
        f"{'stage':>5} {'layers':>6} {'F':>10} {'I':>10} {'W':>10} {'step':>10} {'activation':>12} {'states':>12}",
    ]
    for number, stage in enumerate(profile.stages):
        times = (stage.forward_us, stage.input_us, stage.weight_us, stage.optimizer_us)
        sizes = (stage.activation_bytes, stage.static_bytes)
        cells = [f"{format_us(value):>10}" for value in times] + [f"{format_bytes(value):>12}" for value in sizes]
        lines.append(f"{number:>5} {len(profile.layers[number]):>6} {' '.join(cells)}")
    memory = format_bytes(profile.device_bytes) if profile.device_bytes else "unknown"
    lines.append(f"a micro-batch takes {format_us(profile.comm_us(0))} between stages; a device has {memory}")
    return "\n".join(lines)
