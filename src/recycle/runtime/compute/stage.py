"""`Stage`: the forward and the whole or split backward pass of one stage, for several micro-batches in flight.

Memory follows the plan's model: F keeps the activations of a micro-batch, I frees all but what W needs, W frees the rest.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recycle.core.errors import LossNotScalar, Unsendable, UserError
from recycle.runtime.boundary.auxiliary_losses import Carried, collect_losses
from recycle.runtime.boundary.nests import Nest, map_tensors, tensors_in, unsendable_part
from recycle.runtime.compute.activation_memory import ActivationMeter
from recycle.runtime.compute.elastic_stage import ElasticStage, held_layers, shares_parameters
from recycle.runtime.compute.gradients import Sums
from recycle.runtime.compute.seeds import seed_of
from recycle.runtime.compute.split_backward import Deferral, Tape, defer_weights

Loss = Callable[[Any, Any], Tensor]
"""The mean loss of a micro-batch, from the output of the last stage and the targets; both may be nests."""
Play = Callable[[Tape, Sums], None]
"""Plays a tape into the sums."""


@dataclass(frozen=True, slots=True)
class OpOptions:
    """How ops compute: by autocast to a dtype, with activation checkpointing by layer, with layers compiled by a backend.

    With activation checkpointing F keeps only what each layer was given, and I runs the layer again. Its products are not kept
    for W, which would take the memory that was saved: I computes all gradients, and W nothing. The same holds for compiled
    layers, whose backward pass is one piece of code.
    """

    autocast: torch.dtype | None = None
    recomputes: bool = False
    backend: str = ""

    @property
    def splits(self) -> bool:
        """Whether a backward pass can be split into I and W."""
        return not self.recomputes and not self.backend


class _Part(NamedTuple):
    """A part of the graph of a micro-batch: what it was given, what it made, and what its layers add to the loss.

    If layers are run again, `inputs` are what each was given.
    """

    given: Nest
    made: Nest
    losses: list[Tensor]
    inputs: list[Nest]


@dataclass(slots=True)
class _Flight:
    """A micro-batch between its F and its W: the graph until I, the tape from then on.

    The graph is in parts, the first one first. Mostly there is one part.
    """

    parts: list[_Part]
    is_deferred: bool
    tape: Tape = field(default_factory=Tape)


class Stage:
    """One stage's module, and its micro-batches in flight by chain. The last stage also computes the loss.

    With `meter`, it measures the bytes that micro-batches hold; `how` says how its ops compute.
    `own_layers` are the numbers of its layers in the model, if it says what they are: then random numbers are seeded by layer, so
    that they do not depend on the stage that has the layer. If it `carries_loss`, the sum of what layers up to its own add to the
    loss goes along with its output.
    """

    def __init__(
        self,
        module: nn.Module,
        sums: Sums,
        number: int,
        loss: Loss | None = None,
        how: OpOptions = OpOptions(),  # noqa: B008 (it is frozen)
        device: torch.device | None = None,
        own_layers: range | None = None,
        carries_loss: bool = False,
    ) -> None:
        self.module = module
        self.sums = sums
        self.number = number
        self.meter: ActivationMeter | None = None
        self._loss, self._loss_scale = loss, 1.0
        self._how, self._carries_loss = how, carries_loss
        self._flights: dict[int, _Flight] = {}
        self._deferral = Deferral() if how.backend else defer_weights(module)
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.device = device or next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        # An exact sum needs the same contributions however a pass is split, but torch adds the contributions of a parameter that
        # is used twice before it returns them. Under autocast torch keeps a copy of every weight for each micro-batch. And on a
        # GPU a split pass is faster than a whole one, because products are added to the sums in place.
        self._always_defers = sums.is_exact or how.autocast is not None or self.device.type == "cuda"
        self._layers = held_layers(module, own_layers)
        self._own_layers = module.own_layers if isinstance(module, ElasticStage) else own_layers
        # For the same reason: whether two layers that share a parameter are in one stage must make no difference.
        self._cuts_graph = sums.is_exact and shares_parameters(self._layers.values())
        self._compiled: dict[int | None, Callable[[Nest], Nest]] = {}

    @property
    def is_elastic(self) -> bool:
        return isinstance(self.module, ElasticStage)

    def scale_loss(self, scale: float) -> None:
        """Multiply the loss by `scale` in the backward passes that follow; what is added to the sums has no scale."""
        self._loss_scale, self.sums.factor = scale, 1.0 / scale

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def forward(
        self,
        chain: int,
        given: Nest,
        seed: int,
        targets: Nest = None,
        is_split: bool = True,
        layers: range | None = None,
    ) -> Nest:
        """F: run the module on `given` and return its detached output, or the loss at the last stage.

        A tensor has a gradient path between stages if it is all that passes, or if it requires a gradient in its nest.

        If the backward pass will not be split (`is_split`), Linears are torch's own. An elastic stage runs `layers`, by default
        its own.
        """
        assert chain not in self._flights, f"micro-batch {chain} is in flight already"
        assert layers is None or self.is_elastic, "this stage holds no other layers than its own"
        given, carried = given if isinstance(given, Carried) else (given, None)
        leaf = map_tensors(lambda tensor: self._here(tensor).detach(), given)
        if self.number > 0:  # the gradient of the data is not needed
            require_gradients(leaf, given)
        is_deferred = (is_split and self._how.splits) or self._always_defers
        computing = cast(self.device, self._how.autocast), self._deferral.use(None, is_deferred)
        with torch.enable_grad(), self._metered(chain), computing[0], computing[1]:
            parts = self._run(leaf, seed, layers)
            given, made, losses, kept = parts.pop()
            if self._loss is not None:
                assert targets is not None
                made = self._loss(made, map_tensors(self._here, targets))
            parts.append(_Part(given, made, losses, kept))
        refuse_unusable(made, self.number, is_loss=self._loss is not None)
        self._refuse_no_path(made)
        self._flights[chain] = _Flight(parts, is_deferred)
        if self.meter is not None:
            self.meter.hold(chain, *(tensor for part in parts for tensor in tensors_in(part)))
        return self._with_losses(passed_on(made), carried, [loss for part in parts for loss in part.losses])

    def evaluate(self, given: Nest, seed: int, targets: Nest = None, layers: range | None = None) -> Nest:
        """The output of a forward pass, or the loss at the last stage, as `forward` gives it, for which nothing is kept."""
        given, carried = given if isinstance(given, Carried) else (given, None)
        leaf = map_tensors(lambda tensor: self._here(tensor).detach(), given)
        with torch.no_grad(), cast(self.device, self._how.autocast), self._deferral.use(None, is_on=False):
            parts = self._run(leaf, seed, layers)
            made = parts[-1].made
            if self._loss is not None:
                assert targets is not None
                made = self._loss(made, map_tensors(self._here, targets))
        refuse_unusable(made, self.number, is_loss=self._loss is not None)
        return self._with_losses(passed_on(made), carried, [loss for part in parts for loss in part.losses])

    def _with_losses(self, made: Nest, carried: Tensor | None, losses: list[Tensor]) -> Nest:
        """What a stage passes on, or its loss, with what layers add to the loss, in the order of the layers."""
        for loss in losses:
            carried = loss.detach().float() if carried is None else carried + loss.detach()
        if self._loss is not None:
            return made if carried is None else made + carried
        if not self._carries_loss:
            return made
        # One tensor has a gradient path; beside another one it has to say so.
        nest = made.requires_grad_(True) if isinstance(made, Tensor) else made
        return Carried(nest, torch.zeros((), device=self.device) if carried is None else carried)

    def _here(self, tensor: Tensor) -> Tensor:
        """The tensor on this stage's device. From pinned memory the copy waits for its turn without the host."""
        if self.device.type == "cuda" and tensor.device.type == "cpu":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    def _refuse_no_path(self, made: Nest) -> None:
        """Raise if no gradient would reach the parameters that the stage trains."""
        if self._parameters and not any(tensor.requires_grad for tensor in tensors_in(made)):
            what = "the loss has" if self._loss is not None else f"what stage {self.number} returns has"
            raise Unsendable(
                f"{what} no gradient path to the parameters of stage {self.number}: it was detached, or made without gradients"
            )

    def _run(self, leaf: Nest, seed: int, layers: range | None) -> list[_Part]:
        """Run the layers, or the whole module; return the parts of the graph."""
        parts: list[_Part] = []
        numbers = self._own_layers if layers is None else layers
        given, made, losses, kept = leaf, leaf, list[Tensor](), list[Nest]()
        try:
            for number in [None] if numbers is None else numbers:
                if self._cuts_graph and made is not leaf:
                    parts.append(_Part(given, made, losses, kept))
                    given = made = require_gradients(map_tensors(Tensor.detach, made), made)
                    losses, kept = [], []
                if self._how.recomputes:
                    kept.append(made)
                with collect_losses() as added:
                    made = self._run_layer(number, made, seed)
                losses += added
            return [*parts, _Part(given, made, losses, kept)]
        except RuntimeError as problem:
            if "a leaf Variable that requires grad" in str(problem):
                raise UserError(
                    f"stage {self.number} changes what it is given in place: let its first op make a new tensor (inplace=False)"
                ) from None
            raise

    def _run_layer(self, number: int | None, given: Nest, seed: int) -> Nest:
        """Run a layer, or the whole module; it may be run again in the backward pass, with the same random numbers."""
        layer = self._layer(number)

        def run(given: Nest) -> Nest:
            self._seed(seed_of(seed, self.number if number is None else number))
            return layer(given)

        runs_again = self._how.recomputes and torch.is_grad_enabled()
        return checkpoint(run, given, use_reentrant=False, preserve_rng_state=False) if runs_again else run(given)

    def _layer(self, number: int | None) -> Callable[[Nest], Nest]:
        """A layer, or the whole module, compiled if that is asked for."""
        layer = self.module if number is None else self._layers[number]
        if not self._how.backend:
            return layer
        if number not in self._compiled:
            self._compiled[number] = torch.compile(layer, backend=self._how.backend, dynamic=False)
        return self._compiled[number]

    def forget(self) -> None:
        """Drop all micro-batches in flight; gradients that were summed stay."""
        if self.meter is not None:
            for chain in self._flights:
                self.meter.release(chain)
        self._flights.clear()

    def backward_input(self, chain: int, gradient: Nest) -> Nest:
        """I: return the gradient of the stage's input, None at the first stage; weight gradients are deferred to the tape.

        The gradient of a nest is that of its only tensor with a gradient path, or the tuple of those of several.
        """
        passed = self._go_back(chain, gradient)
        if not self._how.splits:
            self._flights[chain].tape.play(self.sums)
        if self.meter is not None:
            self.meter.after_input(chain, self._flights[chain].tape)
        return passed

    def _go_back(self, chain: int, gradient: Nest) -> Nest:
        """Run the backward pass; the tape has what is left for W."""
        flight = self._flights[chain]
        assert flight.parts, f"micro-batch {chain} has had its I"
        while flight.parts:
            given, made, losses, _ = flight.parts.pop()
            tensors = list(tensors_in(made))
            # One tensor has a gradient path for its receiver, whether it depends on a parameter or not.
            paths = tensors if isinstance(made, Tensor) else [tensor for tensor in tensors if tensor.requires_grad]
            gradients = [self._first_gradient(each) for each in paths] if gradient is None else self._all_here(gradient)
            pairs = [(tensor, each) for tensor, each in zip(paths, gradients, strict=True) if tensor.requires_grad]
            pairs += [(loss, self._first_gradient(loss)) for loss in losses if loss.requires_grad]
            if pairs:
                with self._deferral.use(flight.tape, flight.is_deferred):
                    torch.autograd.backward([tensor for tensor, _ in pairs], [each for _, each in pairs])
            gradient = _gradient_of(given) if self.number > 0 or flight.parts else None
            self._collect()
        return gradient

    def _first_gradient(self, loss: Tensor) -> Tensor | None:
        """The gradient of the loss with which a backward pass begins; None is 1."""
        return torch.full_like(loss, self._loss_scale) if self._loss_scale != 1.0 else None

    def _all_here(self, gradient: Nest) -> list[Tensor | None]:
        return [self._here(each) for each in tensors_in(gradient)]

    def backward_weight(self, chain: int, last: Play | None = None) -> None:
        """W: compute the gradients that I deferred, and drop the micro-batch. `last` does so for the last one."""
        flight = self._flights.pop(chain)
        assert not flight.parts, f"micro-batch {chain} has not had its I"
        (last or Tape.play)(flight.tape, self.sums)
        if self.meter is not None:
            self.meter.release(chain)

    def backward(self, chain: int, gradient: Nest, last: Play | None = None) -> Nest:
        """B: I and W fused."""
        passed = self._go_back(chain, gradient)
        self.backward_weight(chain, last)
        return passed

    def _collect(self) -> None:
        """Move the gradients that autograd accumulated into the sums."""
        pairs = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        self.sums.add([parameter for parameter, _ in pairs], [gradient for _, gradient in pairs])
        for parameter, _ in pairs:
            parameter.grad = None

    def _seed(self, seed: int) -> None:
        """Seed the generators of this stage's device; `torch.manual_seed` seeds those of every kind of device, which is slow."""
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _metered(self, chain: int) -> AbstractContextManager[None]:
        return self.meter.forward(chain) if self.meter is not None else nullcontext()

    def parameters(self) -> Iterator[Tensor]:
        return iter(self._parameters)


def cast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Autocast to `dtype`, or nothing."""
    return torch.autocast(device.type, dtype) if dtype is not None else nullcontext()


def require_gradients(leaf: Nest, given: Nest) -> Nest:
    """Let the tensors of `leaf` require a gradient where those of `given` have a gradient path; return `leaf`."""
    if isinstance(leaf, Tensor):
        return leaf.requires_grad_(True)
    for tensor, like in zip(tensors_in(leaf), tensors_in(given), strict=True):
        tensor.requires_grad_(like.requires_grad)
    return leaf


def passed_on(made: Nest) -> Nest:
    """What a stage made, without its graph; in a nest of several tensors, those with a gradient path require a gradient."""
    if isinstance(made, Tensor):
        return made.detach()
    return map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), made)


def _gradient_of(given: Nest) -> Nest:
    """The gradients of the tensors that require one; zeros where the output does not depend on the tensor."""
    leaves = [tensor for tensor in tensors_in(given) if tensor.requires_grad]
    found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return found[0] if len(found) == 1 else tuple(found)


def refuse_unusable(made: object, number: int, is_loss: bool) -> None:
    """Raise if the output of stage `number` is no valid loss, or cannot be sent to the next stage."""
    if is_loss:
        if not isinstance(made, Tensor) or made.dim() != 0:
            what = f"has the shape {tuple(made.shape)}" if isinstance(made, Tensor) else f"is a {type(made).__name__}"
            raise LossNotScalar(f"the loss {what}, but it must be a scalar tensor: return its mean")
        return
    if (found := unsendable_part(made)) is not None:
        raise Unsendable(
            f"stage {number} returned {found}, which cannot be sent: a stage returns one tensor, or tuples, lists and dicts "
            "of tensors"
        )
    tensors = list(tensors_in(made))
    if not any(tensor.is_floating_point() for tensor in tensors):
        kinds = ", ".join(sorted({str(tensor.dtype) for tensor in tensors})) or "no tensor"
        raise Unsendable(f"stage {number} returned {kinds}, which has no gradient: a stage returns floating point")
    for tensor in tensors:
        if tensor.is_sparse or tensor.layout != torch.strided:
            raise Unsendable(
                f"stage {number} returned a {tensor.layout} tensor, which cannot be sent: a stage returns a dense one"
            )
