"""`Job`: a model in stages, its data, loss, optimizer, plan and options, checked before a process starts."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recycle.core.cluster import Shape
from recycle.core.errors import ForeignPlan, Uncuttable, Unsendable, UserError
from recycle.core.layer_shares import LayerShare
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import check
from recycle.core.problem import Problem
from recycle.core.profile import Profile, StageProfile
from recycle.runtime.boundary.auxiliary_losses import collect_losses
from recycle.runtime.boundary.boundary_spec import BoundarySpec
from recycle.runtime.boundary.nests import Nest, described, map_tensors, num_samples_in, tensors_in, unsendable_part
from recycle.runtime.checkpoint.compatibility import BY_PIPELINE, LAYERS, MICROBATCHES, PIPELINES, STAGES
from recycle.runtime.checkpoint.layer_names import LayerNames, find_layer_names
from recycle.runtime.compute.elastic_stage import elastic_stages, layers_of
from recycle.runtime.compute.microbatches import Dataset, MicroBatchSource, largest_of
from recycle.runtime.compute.optimizer_step import LOSS_SCALE, MakeOptimizer
from recycle.runtime.compute.stage import Loss, cast, passed_on, refuse_unusable, require_gradients
from recycle.runtime.compute.stage_bytes import measure_bytes, measure_layer_activations
from recycle.runtime.compute.tied_parameters import Tie, find_ties
from recycle.runtime.data.evaluation_batches import EvaluationData, evaluation_batches_of
from recycle.runtime.data.joining import make_join
from recycle.runtime.data.make_source import is_source, micro_batches_of
from recycle.runtime.data.torch_loaders import is_loader, unwrapped
from recycle.runtime.options import TrainOptions, refuse_count

# Of the trial with one micro-batch: a stage and its layers one after the other draw the same numbers.
_TRIAL_SEED = 0


@dataclass(frozen=True, slots=True)
class Job:
    """A training job: everything that decides what a run computes, and where it leaves its results.

    Attributes:
        plan: The plan by which the first epoch runs; the live workers of the job are those of the plan. In a job file it may be
            the shape of the cluster, for which the `recycle` command makes a plan.
        stages: The model, one module for every stage of the plan. Each module takes one tensor, or tuples, lists and dicts of
            tensors, and returns such. A parameter that several stages share stays tied.
        dataset: A map-style dataset of pairs (inputs, targets); or a `MicroBatchSource`, an object with a method
            `get(step, pipeline, index)` that makes micro-batches by itself.
        loss: Computes the mean loss of a micro-batch, a scalar, from the output of the last stage and the targets; None is the
            model's own, if its last stage has a method `make_loss()`, as those of `recycle.cut` have.
        optimizer: Makes a torch optimizer from a list of parameters.
        steps: The number of steps of the whole run.
        samples: The number of samples in a micro-batch of the dataset.
        out: The run folder, which gets the plan, the record, the checkpoints and the summary; None writes nothing.
        options: Everything else.

    Raises:
        UserError: The parts of the job do not fit each other; the kind of error and its sentence say which do not.

    Example:
        >>> from functools import partial
        >>> import torch, recycle
        >>> plan = recycle.solve(recycle.problem(2, 2, 2, costs=(1, 1, 1)))
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        >>> dataset = [(torch.ones(4), torch.ones(1))] * 16
        >>> optimizer = partial(torch.optim.SGD, lr=0.1)
        >>> job = recycle.Job(plan, recycle.cut(model, [1]), dataset, torch.nn.functional.mse_loss, optimizer, 3, samples=2)
        >>> job.samples_per_step
        8
    """

    plan: Plan | Shape
    stages: Sequence[nn.Module]
    dataset: Dataset | MicroBatchSource
    loss: Loss | None
    optimizer: MakeOptimizer
    steps: int
    samples: int = 1
    out: Path | str | None = None
    options: TrainOptions = field(default_factory=TrainOptions)

    def __post_init__(self) -> None:
        if is_loader(self.dataset):
            dataset, samples, data = unwrapped(self.dataset, self.samples, self.options.data)
            object.__setattr__(self, "dataset", dataset)
            object.__setattr__(self, "samples", samples)
            object.__setattr__(self, "options", replace(self.options, data=data))
        refuse_count("the number of steps", self.steps, 1)
        if not isinstance(self.plan, Plan | Shape):
            raise UserError(f"the plan is {self.plan!r}, but it must be a Plan or a Shape")
        if len(self.stages) != self.shape.num_stages:
            raise ForeignPlan(
                f"the {'plan' if isinstance(self.plan, Plan) else 'shape'} has {self.shape.num_stages} stages, but the model is "
                f"cut into {len(self.stages)}: make one fit the other"
            )
        for number, module in enumerate(self.stages):
            if not isinstance(module, nn.Module):
                raise UserError(f"stage {number} is a {type(module).__name__}, but it must be an nn.Module")
        _refuse_no_factory(self.optimizer)
        if self.loss is None and not hasattr(self.stages[-1], "make_loss"):
            raise UserError(
                "the job has no loss, and its last stage has none of its own: give loss, a function of outputs and targets"
            )
        if isinstance(self.plan, Plan) and (problems := check(self.plan)):
            raise ForeignPlan(f"the plan is not legal, {problems[0]}: plan again")
        if self.shared_layers:
            _refuse_other_layers(self.plan.problem if isinstance(self.plan, Plan) else None, self.stages, self.shared_layers)
        if self.options.checkpoint.resume and self.out is None:
            raise UserError("resume goes on in a run folder: name it with out")
        _ = self.microbatches  # refuses a dataset that is too small
        if (evaluation := self.evaluation_batches) is not None:
            _refuse_other_samples(self.microbatches.get(0, 0, 0), evaluation[0], self.has_lengths)

    @property
    def shape(self) -> Shape:
        return self.plan.problem.shape if isinstance(self.plan, Plan) else self.plan

    @property
    def first_plan(self) -> Plan:
        """The plan of the first epoch; raises if the job has none yet."""
        if isinstance(self.plan, Plan):
            return self.plan
        raise UserError("the job has a shape and no plan: run it with the recycle command, or make a plan with recycle.solve")

    @property
    def loss_function(self) -> Loss:
        """The loss of the job, or the model's own."""
        return self.stages[-1].make_loss() if self.loss is None else self.loss  # type: ignore[operator]

    @property
    def run_folder(self) -> Path | None:
        return None if self.out is None else Path(self.out)

    @property
    def microbatches(self) -> MicroBatchSource:
        """The micro-batches by their address: those of the dataset in the order that the seed selects, or a source as it is."""
        return micro_batches_of(self.dataset, self.shape, self.samples, self.options.seed, self.options.data)

    @property
    def evaluation_batches(self) -> EvaluationData | None:
        """The micro-batches of the evaluation data, in their order; None if nothing is evaluated."""
        options, join = self.options.evaluation, make_join(self.options.data)
        if options.data is None:
            return None
        return evaluation_batches_of(options.data, options.samples, self.samples, self.shape.num_chains, join)

    @property
    def has_lengths(self) -> bool:
        """Whether micro-batches have lengths of their own, up to that of the padding."""
        return self.options.data.padding is not None

    @property
    def _is_source(self) -> bool:
        """Whether the data are micro-batches by pipeline and index, and no dataset."""
        return is_source(self.dataset)

    @property
    def samples_per_step(self) -> int:
        inputs, _ = largest_of(self.microbatches)
        return self.shape.num_chains * num_samples_in(inputs)

    @property
    def shared_layers(self) -> int:
        return self.plan.problem.shared_layers if isinstance(self.plan, Plan) else self.options.shared_layers

    @property
    def layers(self) -> LayerNames | None:
        """The layers of all stages, by which the run can be resumed with other stages; None if a stage does not name them."""
        try:
            return find_layer_names(self.stages)
        except Uncuttable:
            return None

    @property
    def held_stages(self) -> Sequence[nn.Module]:
        """The stages as workers hold them: with the layers that they share with their neighbours, if they share any."""
        return elastic_stages(self.stages, self.shared_layers) if self.shared_layers else self.stages

    @property
    def ties(self) -> list[Tie]:
        return find_ties(self.held_stages)

    def memory_profile(self) -> Profile:
        """The bytes that a micro-batch holds at each stage, measured on one micro-batch, and if layers are shared, at each layer.

        Times are not measured.
        """
        how = (self.microbatches, self.loss_function, self.options.ops, self.options.device)
        stages = tuple(
            StageProfile(1, 1, 1, 2, activation_bytes=activation, weight_held_bytes=held)
            for activation, held, _ in measure_bytes(self.stages, *how)
        )
        if not self.shared_layers:
            return Profile(stages)
        of_stages = [list(layers_of(stage)) for stage in self.stages]
        sizes = iter(measure_layer_activations([layer for own in of_stages for layer in own], *how))
        # Every layer has some share, so that a stage whose layers keep nothing is no exception.
        layers = tuple(tuple(LayerShare(activation=max(1, next(sizes))) for _ in own) for own in of_stages)
        return Profile(stages, layers=layers)

    def boundaries(self) -> dict[int, BoundarySpec]:
        """The output of each stage but the last, found with one micro-batch; the modules are left as they were."""
        specs: dict[int, BoundarySpec] = {}
        inputs, targets = largest_of(self.microbatches)
        device = torch.device(self.options.device)
        output: Nest = map_tensors(lambda tensor: tensor.to(device), inputs)
        last, has_layers = len(self.stages) - 1, self.layers is not None
        # On the device, since devices cast differently; one stage at a time, since all stages may not fit.
        with torch.no_grad(), torch.random.fork_rng(), cast(device, self.options.autocast), collect_losses() as losses:
            for number, module in enumerate(self.stages):
                on_device = module if device.type == "cpu" else copy.deepcopy(module).to(device)
                torch.manual_seed(_TRIAL_SEED)
                given, output = output, _pure_forward(number, on_device, output)
                if self.shared_layers:
                    torch.manual_seed(_TRIAL_SEED)
                    _refuse_unsharable(number, on_device, given, output, self.shared_layers, number == last)
                elif has_layers:
                    torch.manual_seed(_TRIAL_SEED)
                    _refuse_wrong_layers(number, on_device, given, output)
                if number == last:
                    output = self.loss_function(output, map_tensors(lambda tensor: tensor.to(device), targets))
                refuse_unusable(output, number, is_loss=number == last)
                if not isinstance(output, Tensor):
                    torch.manual_seed(_TRIAL_SEED)
                    output = _with_paths(on_device, given, is_first=number == 0)
                if number < last:
                    specs[number] = BoundarySpec.of(output, self.has_lengths)
        return {number: spec.with_loss() for number, spec in specs.items()} if losses else specs

    def fingerprint(self) -> Mapping[str, Any]:
        """The description of this job in its checkpoints: a job that resumes from one must have the same, but for its shape."""
        shape, options = self.shape, self.options
        return {
            PIPELINES: shape.num_pipelines,
            STAGES: shape.num_stages,
            MICROBATCHES: shape.num_microbatches,
            "seed": options.seed,
            "exact": options.is_exact,
            "max_norm": options.max_norm,
            "sums": str(options.sum_dtype).removeprefix("torch."),
            "autocast": str(options.autocast).removeprefix("torch."),
            **({LOSS_SCALE: asdict(scale)} if (scale := options.used_loss_scale) is not None else {}),
            "data": _describe_data(self.microbatches),
            "ties": _describe_ties(self.stages),
            LAYERS: None if (layers := self.layers) is None else layers.to_json(),
            BY_PIPELINE: self._is_source,
            "about": dict(options.checkpoint.about),
            "model": [
                {
                    name: [*value.shape, str(value.dtype).removeprefix("torch.")]
                    for name, value in module.state_dict().items()
                    if isinstance(value, Tensor)
                }
                for module in self.stages
            ],
        }


def _refuse_other_samples(training: tuple[Nest, Nest], evaluation: tuple[Nest, Nest], has_lengths: bool) -> None:
    """Raise if the evaluation data look otherwise than those of the training, so that stages could not send them on."""
    for what, one, other in zip(("inputs", "targets"), training, evaluation, strict=True):
        if not BoundarySpec.of(one, has_lengths).is_alike(other):
            raise UserError(
                f"the {what} of the evaluation data are {described(other)} in a micro-batch, but those of the training are "
                f"{described(one)}: both must be alike"
            )


def _refuse_no_factory(optimizer: Any) -> None:
    """Raise if there is an optimizer where there must be a function that makes one."""
    if isinstance(optimizer, Optimizer):
        kind, rate = type(optimizer).__name__, optimizer.defaults.get("lr")
        raise UserError(
            f"the optimizer is an {kind} of some parameters, but every worker makes one for those of its stage: give a function, "
            f"such as functools.partial(torch.optim.{kind}, lr={rate!r})"
        )
    if not callable(optimizer):
        raise UserError(f"the optimizer is a {type(optimizer).__name__}, but it must be a function that makes one")


def _refuse_other_layers(problem: Problem | None, stages: Sequence[nn.Module], shared_layers: int) -> None:
    """Raise if the stages have other layers than the plan says, or too few to share."""
    found = [len(layers) for layers in find_layer_names(stages).stages]
    if problem is not None and found != [len(layers) for layers in problem.profile.layers]:
        planned = ", ".join(str(len(layers)) for layers in problem.profile.layers)
        raise ForeignPlan(f"the stages have {', '.join(map(str, found))} layers, but those of the plan {planned}: plan again")
    if shared_layers > min(found):
        raise Uncuttable(f"{shared_layers} layers cannot be shared: stage {found.index(min(found))} has only {min(found)}")


def _refuse_unsharable(number: int, stage: nn.Module, given: Nest, output: Nest, shared_layers: int, is_last: bool) -> None:
    """Raise if a micro-batch cannot be cut beside each of the stage's shared layers.

    All tensors that pass there must be alike, no layer there may change its input in place, and the layers, one after the other,
    must compute what the stage does.
    """
    layers, passed, changing = layers_of(stage), [BoundarySpec.of(given)], list[int]()
    made = given
    for index, layer in enumerate(layers):
        before, versions = made, [tensor._version for tensor in tensors_in(made)]
        made = _with_paths(layer, made, is_first=number == index == 0)
        if [tensor._version for tensor in tensors_in(before)] != versions:
            changing.append(index)
        if (found := unsendable_part(made)) is None:  # the last one of the model may return anything that the loss takes
            passed.append(BoundarySpec.of(made))
        elif index < len(layers) - 1:
            raise Uncuttable(f"layer {index} of stage {number} cannot be shared: it returns {found}, not a tensor")
    _refuse_other_output(number, made, output)
    # Every stage computes a layer at least: no micro-batch is cut before the first layer of the model, or behind the last one.
    last = len(layers) - 1 if is_last else len(layers)
    early = range(min(shared_layers, last) + 1) if number > 0 else range(0)
    late = range(max(len(layers) - shared_layers, 0 if number > 0 else 1), len(layers) + 1) if not is_last else range(0)
    for places in (early, late):
        if len(differing := {passed[place] for place in places}) > 1:
            raise Uncuttable(
                f"the layers of stage {number} cannot be shared: what passes between them differs, "
                f"{' and '.join(sorted(map(str, differing)))}"
            )
        if first := [index for index in changing if index in places]:
            raise Uncuttable(
                f"layer {first[0]} of stage {number} cannot be shared, because it changes its input in place: let it make a new "
                "tensor (inplace=False), or make it part of the layer before it"
            )


def _refuse_wrong_layers(number: int, stage: nn.Module, given: Nest, output: Nest) -> None:
    """Raise if the layers that a stage names do not compute what the stage does; those of an `nn.Sequential` always do."""
    if isinstance(stage, nn.Sequential):
        return
    for layer in layers_of(stage):
        given = layer(given)
    _refuse_other_output(number, given, output)


def _refuse_other_output(number: int, made: Nest, output: Nest) -> None:
    pairs = zip(tensors_in(made), tensors_in(output), strict=False)
    if not all(torch.allclose(one.float(), other.float(), rtol=1e-3, equal_nan=True) for one, other in pairs):
        raise Uncuttable(f"the layers of stage {number}, one after the other, do not compute what the stage does")


def _with_paths(module: nn.Module, given: Nest, is_first: bool) -> Nest:
    """The output of a stage or layer; the tensors of a nest require a gradient where they have a gradient path."""
    leaf = map_tensors(Tensor.detach, given)
    if not is_first and not isinstance(leaf, Tensor):  # a module that changes one tensor in place is named elsewhere
        require_gradients(leaf, given)
    with torch.enable_grad():
        return passed_on(module(leaf))


def _describe_ties(stages: Sequence[nn.Module]) -> list[list[list[int | str]]]:
    """Every tied parameter by its stages and its names there, in the order of the parameters of the model."""
    names = [(number, name) for number, module in enumerate(stages) for name, _ in module.named_parameters()]
    places = {name: place for place, name in enumerate(names)}
    tied = [each for tie in find_ties(stages) for each in tie.by_parameter()]
    return [[[stage, name] for stage, name in each] for each in sorted(tied, key=lambda each: places[each[0]])]


def _describe_data(microbatches: MicroBatchSource) -> str:
    """The repr of the data; the default repr has an address that differs between processes, so the class name replaces it."""
    kind = type(microbatches)
    return kind.__name__ if kind.__repr__ is object.__repr__ else repr(microbatches)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN included."""
    return torch.equal(one.nan_to_num(), other.nan_to_num()) if one.is_floating_point() else torch.equal(one, other)


def _pure_forward(number: int, module: nn.Module, inputs: Nest) -> Any:
    """The output of a forward pass, which must not change the module's buffers.

    A buffer that forward passes change would differ between peers, and depend on which worker ran which micro-batch.
    """
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        output = module(inputs)
    except (TypeError, AttributeError, KeyError, ValueError) as problem:
        if number == 0 or isinstance(inputs, Tensor):
            raise
        raise Unsendable(
            f"stage {number} cannot take what stage {number - 1} returned, {described(inputs)}: {type(problem).__name__}: "
            f"{problem}"
        ) from problem
    changed = [name for name, buffer in module.named_buffers() if name in before and not _is_same(buffer, before[name])]
    for name in changed:
        module.get_buffer(name).copy_(before[name])
    if changed:
        raise UserError(
            f"a forward pass of stage {number} changes its buffer {changed[0]}, which would depend on who ran which micro-batch: "
            "use modules without such state, such as LayerNorm or GroupNorm instead of BatchNorm"
        )
    return output
