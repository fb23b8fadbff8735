"""`CausalModel`: a causal language model, found by its structure; `ModelPart`: some of its layers, run by the model's own code.

The structure is that of Hugging Face's models: somewhere inside there is a module with an embedding, a list of layers and a norm,
and beside that module there is a head. No name is looked for, and `transformers` is not imported.

A part is the model itself with the modules of all other layers left out: a layer that is left out returns what it is given, and
what the part before has made is given in the place of embedded tokens. So masks, rotary embeddings and everything between layers
are made by the model's own code, and parameters keep the names that they have in the model.
"""

import copy
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recycle.core.errors import Uncuttable, UserError
from recycle.runtime.boundary.nests import Nest

_IDS, _EMBEDDED, _HIDDEN = "input_ids", "inputs_embeds", "hidden_states"
# Enough for every kind of attention to do something.
_NUM_TRIAL_TOKENS = 4


@dataclass(frozen=True, slots=True)
class CausalModel:
    """Where the parts of a model are: the names that lead to its body, and in the body the name of the list of layers.

    Layers are numbered from 0: the embedding, then those of the list, and at last the norm with the head.
    """

    path: tuple[str, ...]
    layers: str
    num_layers: int

    def body(self, model: nn.Module) -> nn.Module:
        return model.get_submodule(".".join(self.path))


def find_causal_model(model: nn.Module) -> CausalModel | None:
    """Find the body of a causal language model: a module with an embedding, and one list of at least as many layers as others."""
    found = []
    for name, module in model.named_modules():
        lists = [(own, child) for own, child in module.named_children() if isinstance(child, nn.ModuleList) and len(child)]
        has_embedding = any(isinstance(child, nn.Embedding) for child in module.children())
        if name and has_embedding and len(lists) == 1:
            own, layers = lists[0]
            found.append(CausalModel(tuple(name.split(".")), own, len(layers) + 2))
    return found[0] if len(found) == 1 else None


def model_parts(model: nn.Module, at: CausalModel, bounds: list[range]) -> list["ModelPart"]:
    """The parts of a model with these layers each. They share its modules.

    Raises:
        Uncuttable: The parts one after the other do not compute what the model does.
    """
    parts = [ModelPart(model, at, numbers) for numbers in bounds]
    _refuse_other_logits(model, parts)
    return parts


class ModelPart(nn.Module):
    """The layers `numbers` of a causal language model.

    The first part takes token ids, or a dict of them as "input_ids" with the model's other arguments, such as "attention_mask"
    and "position_ids". Between parts passes the hidden state, or a dict of it with these arguments. The last part returns logits.
    """

    def __init__(self, model: nn.Module, at: CausalModel, numbers: range) -> None:
        super().__init__()
        self._at, self._numbers = at, numbers
        # In a tuple, because it is no child of this module: its children are, so that parameters have the model's own names.
        self._model = (_skeleton(model, at, at.path, numbers),)
        self._modules = self._model[0]._modules

    def forward(self, given: Nest) -> Nest:
        own_name = _IDS if 0 in self._numbers else _HIDDEN
        if isinstance(given, dict) and own_name not in given:
            raise UserError(f"the inputs are a dict of {', '.join(given)}, but the model needs an entry {own_name!r}")
        rest = {name: value for name, value in given.items() if name != own_name} if isinstance(given, dict) else {}
        first = given[own_name] if isinstance(given, dict) else given
        taken_by = self._model[0] if self._is_last else self._at.body(self._model[0])
        self._refuse_foreign(rest, taken_by)
        made = taken_by(**{_IDS if 0 in self._numbers else _EMBEDDED: first}, **rest, use_cache=False)
        if self._is_last:
            return made.logits
        hidden = made.last_hidden_state
        return {_HIDDEN: hidden, **rest} if isinstance(given, dict) else hidden

    @property
    def _is_last(self) -> bool:
        return self._at.num_layers - 1 in self._numbers

    def split_into_layers(self) -> list["ModelPart"]:
        """One part for each layer. They share the modules of this one."""
        return [ModelPart(self._model[0], self._at, range(number, number + 1)) for number in self._numbers]

    def model_config(self) -> str:
        """The configuration of the model as Hugging Face keeps it beside the weights, with the name of its class."""
        config: Any = self._model[0].config
        return json.dumps({**config.to_dict(), "architectures": [type(self._model[0]).__name__]}, indent=1, default=str) + "\n"

    def make_loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The model's own loss, from logits and labels. It shifts labels itself, and leaves those of -100 out."""
        model: Any = self._model[0]
        return partial(_own_loss, model.loss_function, model.config.vocab_size)

    def _refuse_foreign(self, rest: dict[str, Any], taken_by: nn.Module) -> None:
        known = inspect.signature(taken_by.forward).parameters
        if foreign := [name for name in rest if name not in known]:
            raise UserError(
                f"the inputs have an entry {foreign[0]!r}, which {type(taken_by).__name__} does not take: leave it out of the "
                "dataset"
            )

    def extra_repr(self) -> str:
        return f"layers {self._numbers.start} to {self._numbers.stop - 1} of {self._at.num_layers}"


def _own_loss(function: Callable[..., Tensor], vocab_size: int, logits: Tensor, labels: Tensor) -> Tensor:
    return function(logits=logits, labels=labels, vocab_size=vocab_size)


class _LeftOutLayer(nn.Module):
    """In the place of a layer of another part: it returns what it is given."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


class _LeftOutEmbedding(nn.Module):
    """In the place of an embedding of another part: it adds nothing to the hidden state."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self._width, self._dtype = embedding.embedding_dim, embedding.weight.dtype

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(*ids.shape, self._width, dtype=self._dtype, device=ids.device)


def _skeleton(module: nn.Module, at: CausalModel, path: tuple[str, ...], numbers: range) -> nn.Module:
    """A copy of the model that shares the modules of layers `numbers`, and has others in the place of the rest."""
    made = copy.copy(module)
    made._modules = dict(module._modules)  # the dict is copied, and not the modules
    is_last = at.num_layers - 1 in numbers
    if path:
        for name, child in module.named_children():
            if name == path[0]:
                made._modules[name] = _skeleton(child, at, path[1:], numbers)
            elif not is_last:
                del made._modules[name]
        return made
    is_before = True
    for name, child in module.named_children():
        if name == at.layers:
            assert isinstance(child, nn.ModuleList)
            layers = [layer if number in numbers else _LeftOutLayer() for number, layer in enumerate(child, 1)]
            made._modules[name], is_before = nn.ModuleList(layers), False
        elif _computes(child) and (0 if is_before else at.num_layers - 1) not in numbers:
            made._modules[name] = _LeftOutEmbedding(child) if isinstance(child, nn.Embedding) else nn.Identity()
    return made


def _computes(module: nn.Module) -> bool:
    """Whether a module beside the list changes the hidden state; what has no parameters makes positions, for instance."""
    return isinstance(module, nn.Dropout) or next(module.parameters(), None) is not None


def _refuse_other_logits(model: nn.Module, parts: list[ModelPart]) -> None:
    """Raise if the parts compute other logits than the model for some tokens."""
    weight = next(model.parameters())
    if weight.is_meta:
        return
    ids = torch.arange(_NUM_TRIAL_TOKENS, device=weight.device)[None]
    with torch.no_grad(), torch.random.fork_rng([weight.device] if weight.is_cuda else []):
        torch.manual_seed(0)
        try:
            expected = model(input_ids=ids, use_cache=False).logits
        except (TypeError, AttributeError) as problem:
            raise Uncuttable(f"a {type(model).__name__} cannot be cut, it is no causal language model: {problem}") from problem
        torch.manual_seed(0)
        made: Nest = ids
        try:
            for part in parts:
                made = part(made)
        except Exception as problem:  # whatever the code of a model that is built otherwise may raise
            raise Uncuttable(
                f"a {type(model).__name__} cannot be cut by its structure, {type(problem).__name__}: {problem}; cut it by hand "
                "into a list of stages"
            ) from problem
    if not torch.allclose(made, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
        raise Uncuttable(
            f"a {type(model).__name__} cannot be cut by its structure: its embedding, layers, norm and head, one after another, "
            "do not compute what it does; cut it by hand into a list of stages"
        )
