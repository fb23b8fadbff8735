"""`Snapshot`: a copy of a stage's module and optimizer as named tensors and one JSON text, restored bit for bit.

Tensors of the module keep their names in its `state_dict`; those of the optimizer are called `optimizer/<parameter>/<key>`.
Everything else of the optimizer is JSON that refers to tensors by name, tells tuples from lists, and keeps every float exact.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recycle.core.errors import ForeignRun, UserError

OPTIMIZER_PREFIX = "optimizer/"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a stage at one moment: copies of its tensors on the CPU, and the rest of the optimizer as JSON."""

    tensors: Mapping[str, Tensor]
    optimizer: str


def take_snapshot(module: nn.Module, optimizer: Optimizer) -> Snapshot:
    """Copy the state of `module` and `optimizer`, so that training may continue at once."""
    tensors: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            raise UserError(f"{name} of the module is a {type(value).__name__}, which cannot be saved: keep a tensor there")
        if name.startswith(OPTIMIZER_PREFIX):
            raise UserError(
                f"{name} of the module cannot be saved under names that begin with {OPTIMIZER_PREFIX}: call it otherwise"
            )
        tensors[name] = _copied(value)
    names = optimizer_names(module, optimizer)
    held = optimizer.state_dict()
    for number in held["state"]:
        if not isinstance(number, int):
            raise UserError(f"the optimizer holds state for {number!r}, which is no parameter and cannot be saved")
    state = {names[number]: values for number, values in held["state"].items()}
    text = {
        "kind": type(optimizer).__qualname__,
        "groups": [
            text_of_group(group, [names[each] for each in group["params"]], number, tensors)
            for number, group in enumerate(held["param_groups"])
        ],
        "state": {name: _text_form(values, f"{OPTIMIZER_PREFIX}{name}", tensors) for name, values in state.items()},
    }
    return Snapshot(tensors, json.dumps(text))


def text_of_group(group: Mapping[str, Any], params: list[str], number: int, tensors: dict[str, Tensor]) -> Any:
    """A parameter group as JSON, with the names of its parameters; tensors of its options are copied into `tensors`."""
    options = {key: value for key, value in group.items() if key != "params"}
    return _text_form(options | {"params": params}, f"{OPTIMIZER_PREFIX}group {number}", tensors)


def put_weights(tensors: Mapping[str, Tensor], module: nn.Module) -> None:
    """Load the module's part of a snapshot's tensors into `module`, in place."""
    module.load_state_dict(_loadable(tensors, module))


def put_back(snapshot: Snapshot, module: nn.Module, optimizer: Optimizer) -> None:
    """Load the snapshot into `module` and `optimizer`, in place; a snapshot of another job raises before anything changes."""
    weights = _loadable(snapshot.tensors, module)
    text = json.loads(snapshot.optimizer)
    groups = [_value(group, snapshot.tensors) for group in text["groups"]]
    state = {name: _value(values, snapshot.tensors) for name, values in text["state"].items()}
    names = optimizer_names(module, optimizer)
    _refuse_other_optimizer(text["kind"], [group["params"] for group in groups], names, optimizer)
    module.load_state_dict(weights)
    _load_optimizer(optimizer, groups, state, names)


def _loadable(tensors: Mapping[str, Tensor], module: nn.Module) -> dict[str, Any]:
    """The module's part of a snapshot's tensors; raise if they are not those of `module`."""
    own = {name: value for name, value in tensors.items() if not name.startswith(OPTIMIZER_PREFIX)}
    wanted: dict[str, Any] = module.state_dict()
    _refuse_other_tensors(own, wanted)
    wanted.update(own)  # not `own` itself: `wanted` has the version numbers of the modules
    return wanted


def _copied(value: Tensor) -> Tensor:
    # Contiguous as in a file, so that writing needs no second copy.
    memory_format = torch.contiguous_format if value.layout is torch.strided else torch.preserve_format
    return value.detach().to("cpu", copy=True, memory_format=memory_format)


def optimizer_names(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of the optimizer's parameters, in its order."""
    known = {id(parameter): name for name, parameter in module.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in known for parameter in parameters):
        raise UserError("the optimizer holds a parameter that is none of its stage's: make it of the stage's parameters alone")
    return [known[id(parameter)] for parameter in parameters]


def _text_form(value: object, name: str, tensors: dict[str, Tensor]) -> object:
    """`value` as JSON; its tensors are copied into `tensors` under names that begin with `name`."""
    match value:
        case Tensor():
            while name in tensors:  # two keys may read alike, such as 0 and "0"
                name += "'"
            tensors[name] = _copied(value)
            return {"tensor": name}
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": repr(float(value))}
        case tuple():
            return {"tuple": _text_form(list(value), name, tensors)}
        case list():
            return [_text_form(part, f"{name}/{number}", tensors) for number, part in enumerate(value)]
        case dict():
            return {"dict": [[_key(key, name), _text_form(part, f"{name}/{key}", tensors)] for key, part in value.items()]}
    what = name.removeprefix(OPTIMIZER_PREFIX)
    raise UserError(
        f"the optimizer holds a {type(value).__name__} at {what}, which cannot be saved: keep numbers or tensors there"
    )


def _key(key: object, name: str) -> object:
    if isinstance(key, str | int):
        return key
    what = name.removeprefix(OPTIMIZER_PREFIX)
    raise UserError(f"the optimizer holds {key!r} as a key at {what}, which cannot be saved: keys are words or whole numbers")


def _value(text: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value of which `_text_form` made `text`."""
    match text:
        case {"tensor": name}:
            return tensors[name]
        case {"float": number}:
            return float(number)
        case {"tuple": parts}:
            return tuple(_value(parts, tensors))
        case {"dict": pairs}:
            return {key: _value(part, tensors) for key, part in pairs}
        case list():
            return [_value(part, tensors) for part in text]
    return text


def _refuse_other_tensors(saved: Mapping[str, Tensor], wanted: Mapping[str, Any]) -> None:
    for name in [*wanted, *saved]:
        if name not in saved:
            raise ForeignRun(f"the checkpoint has no {name}, which this job trains: resume with the job that made it")
        if name not in wanted:
            raise ForeignRun(f"the checkpoint has {name}, which this job does not train: resume with the job that made it")
        there, here = _described(saved[name]), _described(wanted[name])
        if there != here:
            raise ForeignRun(f"{name} is {there} in the checkpoint, but {here} in this job: resume with the job that made it")


def _described(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _refuse_other_optimizer(kind: str, saved: list[list[str]], names: list[str], optimizer: Optimizer) -> None:
    """Raise unless the optimizer has the class that was saved, and the same parameters in the same groups."""
    if kind != type(optimizer).__qualname__:
        raise ForeignRun(f"the checkpoint was made with {kind}, but this job steps with {type(optimizer).__qualname__}")
    rest = iter(names)
    groups = [[next(rest) for _ in group["params"]] for group in optimizer.param_groups]
    if len(groups) != len(saved):
        raise ForeignRun(f"the checkpoint has {len(saved)} parameter groups, but this job's optimizer has {len(groups)}")
    for number, (there, here) in enumerate(zip(saved, groups, strict=True)):
        if there != here:
            old, new = next(pair for pair in zip_longest(there, here, fillvalue="nothing") if pair[0] != pair[1])
            raise ForeignRun(f"parameter group {number} of the checkpoint has {old} where this job's optimizer has {new}")


def _load_optimizer(optimizer: Optimizer, groups: list[dict[str, Any]], state: dict[str, Any], names: list[str]) -> None:
    """Let the optimizer load its state itself, which chooses the devices, then replace the values by the exact ones."""
    numbers = {name: number for number, name in enumerate(names)}
    devices = [
        {key: value.device for key, value in group.items() if isinstance(value, Tensor)} for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(
        {
            "state": {numbers[name]: values for name, values in state.items()},
            "param_groups": [group | {"params": [numbers[name] for name in group["params"]]} for group in groups],
        }
    )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, values in state.items():
        parameter = parameters[numbers[name]]
        optimizer.state[parameter] = _exact(optimizer.state[parameter], values, parameter)
    for group, where in zip(optimizer.param_groups, devices, strict=True):
        for key, device in where.items():
            if isinstance(group.get(key), Tensor):
                group[key] = group[key].to(device)


def _exact(loaded: Any, saved: Any, parameter: Tensor) -> Any:
    """`saved` on the device of `loaded`: `load_state_dict` casts state to the parameter's dtype, and splits strings."""
    match loaded, saved:
        case Tensor(), Tensor():
            # Fused kernels require the same memory format of state and parameter.
            like = parameter if saved.shape == parameter.shape else saved
            return torch.empty_like(like, dtype=saved.dtype, device=loaded.device, requires_grad=False).copy_(saved)
        case dict(), dict():
            return {key: _exact(value, saved[key], parameter) if key in saved else value for key, value in loaded.items()}
        case (list(), list()) | (tuple(), tuple()):
            return type(saved)(_exact(*pair, parameter) for pair in zip(loaded, saved, strict=True))
    return saved if type(loaded) is type(saved) else loaded
