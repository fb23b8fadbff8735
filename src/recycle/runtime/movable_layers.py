"""`movable_layer_specs`: whether whole layers of a job may move to other stages while it runs, and what passes between them."""

import copy

import torch
from torch import Tensor
from torch.optim import Optimizer

from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import LayerMovingSource
from recycle.runtime.boundary.auxiliary_losses import collect_losses
from recycle.runtime.boundary.boundary_spec import BoundarySpec
from recycle.runtime.boundary.nests import Nest, map_tensors, tensors_in, unsendable_part
from recycle.runtime.compute.elastic_stage import layers_of
from recycle.runtime.compute.microbatches import largest_of
from recycle.runtime.compute.stage import cast, passed_on
from recycle.runtime.job import Job


def movable_layer_specs(job: Job) -> tuple[BoundarySpec, ...]:
    """The outputs of all layers but the last, found with one micro-batch; empty if the layers of this job cannot move.

    They can if the source of plans moves layers, if the plan knows the layers of the stages, if any layer could be the first or
    the last one of a stage, and if the optimizer is torch's own: it steps each parameter by itself.
    """
    if not isinstance(job.options.failures.plan_source, LayerMovingSource) or not isinstance(job.plan, Plan):
        return ()
    if job.layers is None or job.plan.problem.layer_counts != tuple(map(len, job.layers.stages)):
        return ()
    if not _is_of_torch(job):
        return ()
    found = _outputs(job)
    may_cut_anywhere = not job.shared_layers or len(set(found)) == 1
    return found if len(found) >= job.shape.num_stages and may_cut_anywhere else ()


def _is_of_torch(job: Job) -> bool:
    parameters: list[Tensor] = [each for stage in job.stages for each in stage.parameters() if each.requires_grad]
    made: Optimizer | None = job.optimizer(parameters[:1]) if parameters else None
    return made is not None and type(made).__module__.startswith("torch.optim.")


def _outputs(job: Job) -> tuple[BoundarySpec, ...]:
    """The outputs of all layers but the last; empty if one of them cannot be sent, or a layer changes what it is given."""
    device, found = torch.device(job.options.device), list[BoundarySpec]()
    made: Nest = map_tensors(lambda tensor: tensor.to(device), largest_of(job.microbatches)[0])
    layers = [layer for stage in job.stages for layer in layers_of(stage)]
    with torch.enable_grad(), torch.random.fork_rng(), cast(device, job.options.autocast), collect_losses() as losses:
        for number, layer in enumerate(layers):
            given, versions = made, [tensor._version for tensor in tensors_in(made)]
            made = passed_on((layer if device.type == "cpu" else copy.deepcopy(layer).to(device))(given))
            if number == len(layers) - 1:
                break
            tensors = list(tensors_in(made))
            if unsendable_part(made) is not None or [tensor._version for tensor in tensors_in(given)] != versions:
                return ()
            if not any(tensor.is_floating_point() for tensor in tensors) or any(
                tensor.layout != torch.strided for tensor in tensors
            ):
                return ()
            found.append(BoundarySpec.of(made, job.has_lengths))
    return tuple(spec.with_loss() if losses else spec for spec in found)
