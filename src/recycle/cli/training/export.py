"""`recycle export`: the weights of a run as one model, in a format that others read."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from recycle.cli.arguments import Subparsers, add_command, output_path
from recycle.core.errors import UserError
from recycle.core.files import refuse_unwritable
from recycle.core.units import count_text, format_bytes

_DESCRIPTION = """\
Write the weights of a run's checkpoint as one model, whatever the number of stages that trained them: as a safetensors file, as a
folder that from_pretrained of Hugging Face loads, or as a checkpoint of torch.distributed.checkpoint. The names are those of the
model's tensors; they do not change when a run is resumed with another shape. Every byte of the checkpoint is checked."""
_EXAMPLES = """\
examples:
  the newest checkpoint
    recycle export runs/a --out model.safetensors
  the checkpoint of step 20
    recycle export runs/a --step 20 --out model.safetensors
  a folder for Hugging Face, and one for torch.distributed.checkpoint
    recycle export runs/a --to hf exported
    recycle export runs/a --to dcp exported-dcp
  load it in Python
    model.load_state_dict(safetensors.torch.load_file("model.safetensors"))

exit codes: 0 done; 2 input that cannot be used; 15 no whole checkpoint."""


def add_export_parser(subparsers: Subparsers) -> None:
    summary = "write the weights of a run as one model"
    parser = add_command(subparsers, "export", run_export, summary, _DESCRIPTION, _EXAMPLES)
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the folder of the run")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=output_path, metavar="FILE", help="the safetensors file to write")
    kinds = "hf: a folder of Hugging Face; dcp: one of torch.distributed.checkpoint; safetensors: a file"
    where.add_argument("--to", nargs=2, metavar=("FORMAT", "PATH"), help=f"the format and where to write it ({kinds})")
    about = "the checkpoint after N steps (default: the newest whole one)"
    parser.add_argument("--step", type=int, metavar="N", help=about)
    parser.add_argument("--json", action="store_true", help="print what was written as one JSON object")


def run_export(args: argparse.Namespace) -> None:
    from recycle.runtime.checkpoint.export import export_model
    from recycle.runtime.checkpoint.model_formats import MODEL_FORMATS, SAFETENSORS

    kind, path = (SAFETENSORS, args.out) if args.out is not None else (args.to[0], Path(args.to[1]))
    if kind not in MODEL_FORMATS:
        raise UserError(f"--to {kind} is no format of a model: choose from {', '.join(MODEL_FORMATS)}")
    refuse_unwritable(path if kind == SAFETENSORS else path / "config.json")
    made = export_model(args.run_folder, path, args.step, kind)
    if args.json:
        print(json.dumps(asdict(made) | {"path": str(made.path)}))
        return
    size, steps = format_bytes(made.size_bytes), count_text(made.num_steps, "step")
    print(f"{made.path}: {count_text(made.num_tensors, 'tensor')}, {size}, after {steps}")
