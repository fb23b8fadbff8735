"""`recycle.train`, which trains a model on this machine: it survives failures, shows its progress and records the run."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from recycle.api.run_folders import NEW_RUN, NUMBER, new_folder
from recycle.cli.live.run_observers import RunObservers, observers_of_run
from recycle.core.cluster import Shape
from recycle.core.errors import UserError
from recycle.core.events.record import Event
from recycle.core.plans.library import without_failures
from recycle.core.plans.plan import Plan
from recycle.runtime.callbacks.protocol import Callback
from recycle.runtime.compute.microbatches import Dataset, MicroBatchSource
from recycle.runtime.compute.optimizer_step import MakeOptimizer
from recycle.runtime.compute.stage import Loss
from recycle.runtime.coordinator.ledger.trained import Trained
from recycle.runtime.cutting.cut import cut
from recycle.runtime.data.make_source import micro_batches_of
from recycle.runtime.data.torch_loaders import is_loader, unwrapped
from recycle.runtime.job import Job
from recycle.runtime.job_checks import doubts_about, refuse_changing_data, refuse_float16_parameters, refuse_unusable_optimizer
from recycle.runtime.launch.local_launcher import Watch
from recycle.runtime.launch.watched_launch import launch_watched
from recycle.runtime.options import TrainOptions

_DEFAULTS = TrainOptions()
# Near the bound in a moment: a few per cent of a plan are not worth a wait before training begins.
_PLAN_EFFORT = 6_000_000


def train(
    plan: Plan | Shape | tuple[int, int, int],
    stages: Sequence[nn.Module] | nn.Module,
    dataset: Dataset | MicroBatchSource,
    loss: Loss | None,
    optimizer: MakeOptimizer,
    *,
    steps: int,
    samples: int = 1,
    out: Path | str | None = NEW_RUN,
    options: TrainOptions = _DEFAULTS,
    watch: Watch = lambda event: None,
    callbacks: Sequence[Callback] = (),
) -> Trained:
    """Train a model on this machine, with a process for every live worker of a plan.

    When a worker dies, the others go on by another plan. Progress is shown on the error stream: as a picture of all workers in a
    terminal, and in lines elsewhere. The run is recorded in a new folder, which `recycle report` shows.

    The modules in `stages` are left as they were: the trained weights are in the checkpoints of `out`, and `recycle.load` reads
    them. Functions and classes may be defined anywhere: workers get them by value, and do not import the script.

    Args:
        plan: The plan of the first epoch; or the numbers of pipelines, stages and micro-batches of a pipeline to plan for.
        stages: A model that `recycle.cut` can cut, or a list with a module for every stage of the plan. Each takes one tensor, or
            tuples, lists and dicts of tensors, and returns such. Parameters that stages share stay tied.
        dataset: A map-style dataset of pairs (inputs, targets), or of dicts with an entry "labels". It may have a text
            `fingerprint`; a run is then resumed only with a dataset of the same fingerprint.
        loss: Computes the mean loss of a micro-batch, a scalar, from the output of the last stage and the targets. None is the
            model's own loss, if `recycle.cut` has cut it.
        optimizer: Makes a torch optimizer from a list of parameters; every worker calls it for its stage.
        steps: The number of steps of the whole run, including those before a resume.
        samples: The number of samples in a micro-batch.
        out: The run folder: plans, a record that grows while the run goes on, summary and checkpoints. In the place of `{number}`
            comes the first number that is free. None: nothing is written.
        options: Everything else: seed, exact sums, clipping, schedule, precision, device, checkpoints, failures, what is shown.
        watch: Called in this process with every event of the record. An error that it raises is a warning.
        callbacks: Objects that are called with every step, evaluation, recovery and checkpoint, such as `recycle.CsvLogger`.

    Returns:
        The losses, the SHA-256 of the weights, the recoveries, the times and the folder of the run.

    Raises:
        UserError: The input cannot be used, or a worker failed; the kind of error and its sentence say why. `Stopped`: the first
            Ctrl-C or SIGTERM came, and the run has written a checkpoint of the step at which it stopped.

    Example:
        >>> import functools, torch, recycle
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        >>> dataset = [(torch.ones(4), torch.ones(1))] * 16
        >>> optimizer = functools.partial(torch.optim.SGD, lr=0.1)
        >>> options = recycle.TrainOptions(is_exact=True, max_norm=1.0, quiet=True)
        >>> how = torch.nn.functional.mse_loss, optimizer
        >>> trained = recycle.train((2, 2, 2), model, dataset, *how, steps=3, out=None, options=options)
        >>> len(trained.losses)
        3
    """
    made = plan if isinstance(plan, Plan) else _plan_for(plan, options)
    modules, options = _modules(stages, made.problem.shape, dataset, samples, options), _with_plan_source(options, made)
    return _run(Job(made, modules, dataset, loss, optimizer, steps, samples, out, options), watch, callbacks)


def _run(job: Job, watch: Watch, callbacks: Sequence[Callback]) -> Trained:
    """Check a job, launch it, and show and record what happens."""
    if job.options.checkpoint.resume and NUMBER in str(job.out):
        raise UserError("resume goes on in a run folder: name it with out")
    _refuse_unshowable(job)
    refuse_changing_data(job)
    refuse_unusable_optimizer(job)
    refuse_float16_parameters(job)
    for doubt in doubts_about(job):
        warnings.warn(doubt, stacklevel=3)
    with _run_folder(job.out) as folder, _observers_of(job, folder) as view:
        observers = {"the note of the folder": _said_once(folder, view.say), "watch": watch, **view.observers}
        trained = launch_watched(replace(job, out=folder), observers, callbacks, view.warn, view.injections)
    for sentence in trained.warnings if job.options.quiet else ():
        warnings.warn(sentence, stacklevel=3)
    return replace(trained, out=folder)


def _refuse_unshowable(job: Job) -> None:
    """Raise if a page is asked for that would have nothing to show, or whose address nobody would learn."""
    show = job.options.show
    if job.options.quiet and (show.dashboard is not None or show.json_lines):
        raise UserError(
            "quiet prints nothing, neither the address of the page nor JSON lines: leave it out, or dashboard and json_lines"
        )
    if job.options.show.dashboard is not None and job.out is None:
        raise UserError("dashboard shows what a run records: name a folder with out")


def _observers_of(job: Job, folder: Path | None) -> AbstractContextManager[RunObservers]:
    return observers_of_run(job.options.show, job.first_plan, job.steps, folder, job.options.quiet)


def _said_once(folder: Path | None, say: Callable[[str], None]) -> Watch:
    """An observer that says with the first event where a run is recorded: a job that is refused has no event."""
    left = [] if folder is None else [f"the run is recorded in {folder}: recycle report {folder} shows it"]

    def observe(event: Event) -> None:
        while left:
            say(left.pop())

    return observe


def _plan_for(shape: Shape | tuple[int, int, int], options: TrainOptions) -> Plan:
    """A plan for a shape with nobody dead, in which all ops take the same time, unless they compute otherwise."""
    from recycle.planner.heuristic.greedy import compile_kernels
    from recycle.planner.problem_from_text import problem, unsplit_costs
    from recycle.planner.solve import solve

    match shape:
        case Shape():
            numbers = shape.num_pipelines, shape.num_stages, shape.num_microbatches
        case (int(), int(), int()):
            numbers = shape
        case _:
            raise UserError(
                f"the plan is {shape!r}, but it must be a plan, or numbers of pipelines, stages and micro-batches of a pipeline"
            )
    costs = (1, 1, 1) if options.ops.splits else unsplit_costs((10, 10, 10), options.ops.recomputes)
    made = problem(*numbers, costs=costs)
    compile_kernels(made)  # now, rather than while workers wait for the plan after a failure
    return solve(made, "greedy", effort=_PLAN_EFFORT)


def _modules(
    stages: Sequence[nn.Module] | nn.Module, shape: Shape, dataset: Any, samples: int, options: TrainOptions
) -> Sequence[nn.Module]:
    """The stages as they were given, or those of a whole model, cut by what its layers compute for the first micro-batch."""
    if isinstance(stages, nn.ModuleList):
        return list(stages)
    if not isinstance(stages, nn.Module):
        return stages
    if any(isinstance(part, _ConvNd) for part in stages.modules()):  # whose weights say little of what they cost
        try:
            data = options.data
            if is_loader(dataset):
                dataset, samples, data = unwrapped(dataset, samples, data)
            inputs, _ = micro_batches_of(dataset, shape, samples, options.seed, data).get(0, 0, 0)
            return cut(stages, stages=shape.num_stages, sample=inputs)
        except Exception as problem:  # if data or model are wrong, the job says so later, in a sentence
            reason = f"its layers could not be counted with the first micro-batch ({type(problem).__name__}: {problem})"
            warnings.warn(f"the model is cut by the numbers of its weights: {reason}", stacklevel=4)
    return cut(stages, stages=shape.num_stages)


def _with_plan_source(options: TrainOptions, plan: Plan) -> TrainOptions:
    """The options with a planner, if they have no source of plans and a death shall not end the run."""
    failures = options.failures
    if failures.plan_source is not None or not failures.recovers:
        return options
    from recycle.planner.live_planner import Planner

    source = Planner(without_failures(plan.problem), given=plan)
    return replace(options, failures=replace(failures, plan_source=source))


@contextmanager
def _run_folder(out: Path | str | None) -> Iterator[Path | None]:
    """The run folder; a new one is removed if nothing was written into it."""
    if not (isinstance(out, str) and NUMBER in out):
        yield None if out is None else Path(out)
        return
    folder = new_folder(out)
    try:
        yield folder
    finally:
        with suppress(OSError):
            folder.rmdir()
