"""`recycle.train`, which trains a model on this machine by a plan, and `recycle.cut`, which cuts a model into stages."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from torch import nn

from recycle.core.errors import Uncuttable
from recycle.core.layers import split_layers
from recycle.core.plans.plan import Plan
from recycle.runtime.callbacks.protocol import Callback
from recycle.runtime.checkpoint.layer_names import find_layer_names
from recycle.runtime.compute.elastic_stage import layers_of
from recycle.runtime.compute.microbatches import Dataset
from recycle.runtime.compute.optimizer_step import MakeOptimizer
from recycle.runtime.compute.stage import Loss
from recycle.runtime.coordinator.ledger.trained import Trained
from recycle.runtime.job import Job
from recycle.runtime.launch.local_launcher import Watch
from recycle.runtime.launch.watched_launch import launch_watched
from recycle.runtime.options import TrainOptions

_DEFAULTS = TrainOptions()


def cut(model: nn.Sequential, cuts: Sequence[int]) -> list[nn.Module]:
    """Cut a model into stages.

    Args:
        model: The modules one after the other.
        cuts: Numbers of modules in ascending order; a new stage begins with each of them.

    Returns:
        The stages. They share the modules of `model`.

    Raises:
        Uncuttable: The model is not an `nn.Sequential`, or a stage would be empty.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> [len(stage) for stage in cut(model, [2])]
        [2, 1]
    """
    if not isinstance(model, nn.Sequential):
        raise Uncuttable(f"a {type(model).__name__} cannot be cut: give an nn.Sequential, or a list of stages")
    bounds = [0, *cuts, len(model)]
    if any(after <= before for before, after in pairwise(bounds)):
        raise Uncuttable(
            f"cuts at {list(cuts)} do not leave a module in every stage of a model of {len(model)}: give ascending numbers "
            f"from 1 to {len(model) - 1}"
        )
    return [model[start:stop] for start, stop in pairwise(bounds)]


def recut(stages: Sequence[nn.Module], num_stages: int) -> list[nn.Module]:
    """Distribute the layers of a model over another number of stages.

    Args:
        stages: The stages of the model. Each is an `nn.Sequential`, or has a method `split_into_layers()`.
        num_stages: The number of stages to make.

    Returns:
        The stages, with about as many layers each. They share the layers of the given ones.

    Raises:
        Uncuttable: A stage does not say what its layers are, or there are fewer layers than stages.

    Example:
        >>> stages = cut(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), [2])
        >>> [len(stage) for stage in recut(stages, 3)]
        [1, 1, 1]
    """
    find_layer_names(stages)  # refuses stages that their layers do not make up
    layers = [layer for stage in stages for layer in layers_of(stage)]
    if not 1 <= num_stages <= len(layers):
        raise Uncuttable(f"{num_stages} stages cannot be made of {len(layers)} layers: every stage needs a layer")
    names = [str(number) for number in range(len(layers))]
    if all(isinstance(stage, nn.Sequential) for stage in stages):
        own = [name for stage in stages for name in stage._modules]
        names = own if len(set(own)) == len(layers) else names
    stops = list(accumulate(split_layers(len(layers), 1, [0] * num_stages), initial=0))
    named = list(zip(names, layers, strict=True))
    return [nn.Sequential(OrderedDict(named[start:stop])) for start, stop in pairwise(stops)]


def train(
    plan: Plan,
    stages: Sequence[nn.Module],
    dataset: Dataset,
    loss: Loss,
    optimizer: MakeOptimizer,
    *,
    steps: int,
    samples: int = 1,
    out: Path | str | None = None,
    options: TrainOptions = _DEFAULTS,
    watch: Watch = lambda event: None,
    callbacks: Sequence[Callback] = (),
) -> Trained:
    """Train a model on this machine, with a process for every live worker of a plan.

    The modules in `stages` are left as they were: the trained weights are in the checkpoints of `out`, and `recycle.load` reads
    them. Every worker process imports the script that calls `train`, so the call stands under `if __name__ == "__main__":`, and
    the dataset, the loss, the optimizer and the classes of the modules are defined at the top level of a file.

    Args:
        plan: The plan of the first epoch, such as `recycle.solve` returns.
        stages: One module for every stage of the plan. Each takes one tensor and returns one. Parameters that stages share stay
            tied.
        dataset: A map-style dataset of pairs (inputs, targets). It may have a text `fingerprint`; a run is then resumed only
            with a dataset of the same fingerprint.
        loss: Computes the mean loss of a micro-batch, a scalar, from the output of the last stage and the targets.
        optimizer: Makes a torch optimizer from a list of parameters. Every worker calls it with the parameters of its stage.
        steps: The number of steps of the whole run, including those before a resume.
        samples: The number of samples in a micro-batch.
        out: The run folder. It gets `plan.json` (and in `plans/` the plans of later epochs), `record.jsonl`, which grows while
            the run goes on, `summary.json` and `checkpoints/`. Without it, nothing is written.
        options: Everything else: seed, exact sums, clipping, schedule, precision, device, checkpoints, failures.
        watch: Called in this process with every event of the record.
        callbacks: Objects that are called with every step, evaluation, recovery and checkpoint, such as `recycle.CsvLogger`.

    Returns:
        The losses, the SHA-256 of the weights, the recoveries and the times of the run.

    Raises:
        UserError: The input cannot be used, or a worker failed; the kind of error and its sentence say why. `Stopped`: the first
            Ctrl-C or SIGTERM came, and the run has written a checkpoint of the step at which it stopped.

    Example:
        >>> from functools import partial
        >>> import torch, recycle
        >>> plan = recycle.solve(recycle.problem(2, 2, 2, fail="W1_1", costs=(1, 1, 1)))
        >>> stages = recycle.cut(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)), [1])
        >>> dataset = [(torch.ones(4), torch.ones(1))] * 16
        >>> optimizer = partial(torch.optim.SGD, lr=0.1)
        >>> options = recycle.TrainOptions(is_exact=True, max_norm=1.0)
        >>> trained = recycle.train(plan, stages, dataset, torch.nn.functional.mse_loss, optimizer, steps=3, options=options)
        >>> len(trained.losses)
        3
    """
    return launch_watched(Job(plan, stages, dataset, loss, optimizer, steps, samples, out, options), watch, callbacks)
