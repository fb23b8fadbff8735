"""What a job is told before it begins: data that are other ones each time, and precisions that are probably not meant."""

import inspect

import torch
from torch import Tensor
from torch.optim import Optimizer

from recycle.core.errors import UserError
from recycle.runtime.boundary.nests import Nest, tensors_in
from recycle.runtime.compute.microbatches import HALVES, read_part
from recycle.runtime.job import Job


def refuse_changing_data(job: Job) -> None:
    """Raise if the first micro-batch is another one when it is read again.

    Any worker may read a micro-batch, and reads it again after a failure: then it must be the same.
    """
    once, again = job.microbatches.get(0, 0, 0), job.microbatches.get(0, 0, 0)
    if not _is_equal(once, again):
        raise UserError(
            "the dataset gives other samples when it is asked again for the same numbers, but another worker must get the same: "
            "draw random numbers from the generators of torch, random or numpy, which are seeded for every sample"
        )
    if getattr(job.microbatches, "has_halves", False):
        for takes, name, whole in zip(((True, False), (False, True)), HALVES, once, strict=True):
            half = read_part(job.microbatches, (0, 0, 0), takes)[takes[1]]
            if not _is_equal(half, whole):
                raise UserError(
                    f"the method {name} of the dataset makes something else than dataset[number] has as its {name}: make both "
                    "alike, or leave the method out"
                )


def refuse_unusable_optimizer(job: Job) -> None:
    """Raise if the optimizer of the job cannot step a stage by its gradients alone, or if its rate cannot be scheduled."""
    all_parameters = (each for stage in job.stages for each in stage.parameters() if each.requires_grad)
    parameters: list[Tensor] = list({id(each): each for each in all_parameters}.values())  # tied ones once
    if not parameters:
        return
    made = job.optimizer(parameters)
    if not isinstance(made, Optimizer):
        raise UserError(f"the function for the optimizer makes a {type(made).__name__}, but it must make a torch optimizer")
    kind = type(made).__name__
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(f"{kind} computes the loss several times in a step, which workers cannot do: choose another optimizer")
    if isinstance(made, torch.optim.SparseAdam):
        raise UserError(
            f"{kind} takes sparse gradients only, but workers sum dense ones: choose another optimizer, such as AdamW"
        )
    if without := [number for number, group in enumerate(made.param_groups) if "lr" not in group]:
        raise UserError(
            f"parameter group {without[0]} of {kind} has no learning rate 'lr', which the schedule changes: give it one"
        )
    known = {id(each) for each in parameters}
    if any(id(each) not in known for group in made.param_groups for each in group["params"]):
        raise UserError(
            f"{kind} was made with other parameters than it was given: every worker makes it for the parameters of its stage"
        )


def refuse_float16_parameters(job: Job) -> None:
    """Raise if parameters are in float16, in which a gradient cannot be freed from the scale of the loss."""
    for number, stage in enumerate(job.stages):
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad and parameter.dtype is torch.float16:
                raise UserError(
                    f"parameter {name} of stage {number} is torch.float16, in which most gradients are 0 or infinite: keep "
                    "parameters in float32, and set TrainOptions(autocast=torch.float16), which scales the loss"
                )


def _is_equal(one: Nest, other: Nest) -> bool:
    pairs = zip(tensors_in(one), tensors_in(other), strict=False)
    return len(list(tensors_in(one))) == len(list(tensors_in(other))) and all(_has_same_bits(*pair) for pair in pairs)


def _has_same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def doubts_about(job: Job) -> list[str]:
    """Sentences on what is allowed, and probably not meant."""
    found, dtypes = list[str](), dict[torch.dtype, tuple[int, str]]()
    for number, stage in enumerate(job.stages):
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad and parameter.dtype is torch.bfloat16:
                dtypes.setdefault(parameter.dtype, (number, name))
    for dtype, (number, name) in dtypes.items():
        found.append(
            f"parameter {name} of stage {number} is {dtype}, and no copy in float32 is kept: steps that are smaller than its "
            "rounding change nothing; keep parameters in float32, and set TrainOptions(autocast=torch.bfloat16)"
        )
    return found
