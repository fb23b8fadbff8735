"""`recycle.train`, which trains a model on this machine by a plan."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from recycle.core.plans.plan import Plan
from recycle.runtime.callbacks.protocol import Callback
from recycle.runtime.compute.microbatches import Dataset
from recycle.runtime.compute.optimizer_step import MakeOptimizer
from recycle.runtime.compute.stage import Loss
from recycle.runtime.coordinator.ledger.trained import Trained
from recycle.runtime.job import Job
from recycle.runtime.launch.local_launcher import Watch
from recycle.runtime.launch.watched_launch import launch_watched
from recycle.runtime.options import TrainOptions

_DEFAULTS = TrainOptions()


def train(
    plan: Plan,
    stages: Sequence[nn.Module],
    dataset: Dataset,
    loss: Loss | None,
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
        stages: One module for every stage of the plan, such as `recycle.cut` returns. Each takes one tensor, or tuples, lists
            and dicts of tensors, and returns such. Parameters that stages share stay tied.
        dataset: A map-style dataset of pairs (inputs, targets), or of dicts with an entry "labels". It may have a text
            `fingerprint`; a run is then resumed only with a dataset of the same fingerprint.
        loss: Computes the mean loss of a micro-batch, a scalar, from the output of the last stage and the targets. None is the
            model's own loss, if `recycle.cut` has cut it.
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
