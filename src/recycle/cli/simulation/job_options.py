"""Options that say what is trained: a model and a GPU, or a measured profile; and, for `recycle simulate`, the shape."""

import argparse

from recycle.cli.arguments import add_file_options, add_shape_options
from recycle.cli.profile_text import mismatch_note
from recycle.core.cluster import Shape
from recycle.core.errors import UserError
from recycle.core.profile import Profile
from recycle.core.units import parse_bytes
from recycle.planner.profiles.catalog import GpuSpec, ModelSpec, parse_gpu, parse_model
from recycle.sim.job import SimulatedJob
from recycle.sim.measured_model import MeasuredDevice, MeasuredModel, measured

_PROFILE_OPTIONS = ("memory", "layers", "sequence")
_ESTIMATE_OPTIONS = ("model", "gpu", "tensor_parallel", "context_parallel")


def add_job_options(job: argparse._ActionsContainer) -> None:
    """Add the options that `read_simulated_job` reads."""
    add_model_options(job)
    add_shape_options(job)
    job.add_argument("--tensor-parallel", type=int, metavar="T", help="GPUs of a worker (default: 1)")
    about = "groups of such GPUs in a worker that divide every sequence (default: 1)"
    job.add_argument("--context-parallel", type=int, metavar="C", help=about)


def add_model_options(job: argparse._ActionsContainer) -> None:
    """Add the options that `read_model_and_gpu` reads."""
    job.add_argument("--model", help="a model by name or by its numbers; see 'recycle estimate --help'")
    job.add_argument("--gpu", help="a GPU by name or by its numbers")
    add_file_options(job, profile="instead of both: a measured profile, as 'recycle profile' writes it")
    about = "with --profile: the memory of a device, such as 80GiB; a measured profile does not know it"
    job.add_argument("--memory", metavar="SIZE", help=about)
    about = "with --profile: the number of layers, all alike, if the profile does not list them"
    job.add_argument("--layers", type=int, metavar="N", help=about)
    about = "with --profile: the tokens of a sample, for the cost of a million tokens (default: samples are counted)"
    job.add_argument("--sequence", type=int, metavar="N", help=about)


def read_simulated_job(args: argparse.Namespace) -> SimulatedJob:
    shape = Shape(args.pipelines, args.stages, args.microbatches)
    if args.profile is not None:
        profile, memory_bytes = _measured_profile(args)
        return SimulatedJob.of_profile(profile, shape, memory_bytes, sequence=args.sequence or 0)
    _refuse_half_a_model(args)
    degrees = (1 if degree is None else degree for degree in (args.tensor_parallel, args.context_parallel))
    tensor_parallel, context_parallel = degrees
    return SimulatedJob.of(args.model, args.gpu, shape, tensor_parallel, context_parallel=context_parallel)


def read_model_and_gpu(args: argparse.Namespace) -> tuple[ModelSpec, GpuSpec] | tuple[MeasuredModel, MeasuredDevice]:
    """The model and the GPU by name, or both by a measured profile."""
    if args.profile is not None:
        profile, memory_bytes = _measured_profile(args)
        return measured(profile, memory_bytes, sequence=args.sequence or 0)
    _refuse_half_a_model(args)
    return parse_model(args.model), parse_gpu(args.gpu)


def _refuse_half_a_model(args: argparse.Namespace) -> None:
    for option in _PROFILE_OPTIONS:
        if getattr(args, option) is not None:
            raise UserError(f"--{option} goes with --profile: a model and a GPU by name have their own")
    for option in ("model", "gpu"):
        if getattr(args, option) is None:
            raise UserError(f"--{option} is missing: give --model and --gpu, or a measured --profile")


def _measured_profile(args: argparse.Namespace) -> tuple[Profile, int]:
    """The profile, and the memory of a device."""
    for option in _ESTIMATE_OPTIONS:
        if getattr(args, option, None) is not None:
            name = option.replace("_", "-")
            raise UserError(f"--{name} and --profile both say what ops cost: leave --{name} out, the profile has it as measured")
    profile = _with_layers(Profile.load(args.profile), args.layers)
    if args.sequence is not None and not 1 <= args.sequence <= 10**8:
        raise UserError(f"--sequence is {args.sequence}, but a sample has from 1 to 100000000 tokens")
    if args.memory is not None:
        return profile, parse_bytes(args.memory)
    if profile.device_bytes is None:
        raise UserError(f"the profile {args.profile} does not say how much memory a device has: give it, such as --memory 80GiB")
    return profile, profile.device_bytes


def _with_layers(profile: Profile, num_layers: int | None) -> Profile:
    if num_layers is None:
        return profile
    if profile.layers:
        known = sum(map(len, profile.layers))
        raise UserError(f"the profile lists its {known} layers itself: leave --layers out")
    return profile.with_equal_layers(num_layers)


def profile_note(job: SimulatedJob) -> str | None:
    """A remark if the profile was measured with another number of pipelines."""
    if not isinstance(job.model, MeasuredModel):
        return None
    return mismatch_note(job.model.profile.taken, job.shape.num_pipelines)
