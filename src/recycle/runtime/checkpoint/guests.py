"""Checkpoints and guests: a stage's file has no guests, because the file of their own stage has them.

So a checkpoint is the same whatever layers are shared, and a run can resume with more or fewer of them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from recycle.core.errors import ForeignRun
from recycle.runtime.checkpoint.state import OPTIMIZER_PREFIX, Snapshot
from recycle.runtime.compute.elastic_stage import OWN, ElasticStage

_Names = Mapping[str, Sequence[str]]
"""New names by the old one: a tensor of another stage may be held under several."""


def without_guests(snapshot: Snapshot, module: nn.Module) -> Snapshot:
    """The part of a stage's snapshot that its file has, with the names of the user's module."""
    if not isinstance(module, ElasticStage):
        return snapshot
    return _renamed(snapshot, {f"{OWN}{name}": [name] for name in module.own.state_dict()}, _order(module.own))


def with_guests(snapshots: Mapping[int, Snapshot], stage: int, module: nn.Module) -> Snapshot:
    """The snapshot of a stage with its guests, from those of the files of its own stage and of `module.homes`."""
    if not isinstance(module, ElasticStage):
        return snapshots[stage]
    order = _order(module)
    parts = [_renamed(snapshots[stage], {name: [f"{OWN}{name}"] for name in module.own.state_dict()}, order)]
    for home in module.homes:
        names: dict[str, list[str]] = {}
        for name, (number, there) in module.names_at_home.items():
            if number == home:
                names.setdefault(there, []).append(name)
        parts.append(_renamed(snapshots[home], names, order))
    return _joined(parts, order)


def _order(module: nn.Module) -> dict[str, int]:
    """The place of every parameter by its name; a parameter with several names has its first one, as in an optimizer."""
    return {name: number for number, (name, _) in enumerate(module.named_parameters())}


def _renamed(snapshot: Snapshot, names: _Names, order: Mapping[str, int]) -> Snapshot:
    """What a snapshot says of these tensors under their new names, and of the optimizer for those in `order`."""
    text = json.loads(snapshot.optimizer)
    tensors = {new: snapshot.tensors[old] for old, several in names.items() for new in several if old in snapshot.tensors}
    state = {}
    for old, values in text["state"].items():
        for new in (new for new in names.get(old, ()) if new in order):
            prefixes = f"{OPTIMIZER_PREFIX}{old}", f"{OPTIMIZER_PREFIX}{new}"
            state[new] = _with_tensors(values, *prefixes, snapshot, tensors)
    groups = [
        _with_params(group, [new for old in _params(group) for new in names.get(old, ()) if new in order])
        for group in text["groups"]
    ]
    for number, group in enumerate(groups):
        prefix = f"{OPTIMIZER_PREFIX}group {number}"
        _with_tensors(group, prefix, prefix, snapshot, tensors)
    return Snapshot(tensors, json.dumps({"kind": text["kind"], "groups": groups, "state": state}))


def _with_tensors(value: Any, old: str, new: str, snapshot: Snapshot, tensors: dict[str, Any]) -> Any:
    """The JSON of a value whose tensors begin with another name; the tensors are added under it."""
    match value:
        case {"tensor": name}:
            renamed = new + name.removeprefix(old)
            tensors[renamed] = snapshot.tensors[name]
            return {"tensor": renamed}
        case dict():
            return {key: _with_tensors(part, old, new, snapshot, tensors) for key, part in value.items()}
        case list():
            return [_with_tensors(part, old, new, snapshot, tensors) for part in value]
    return value


def _params(group: Mapping[str, Any]) -> list[str]:
    return next(names for key, names in group["dict"] if key == "params")


def _with_params(group: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {"dict": [[key, names if key == "params" else value] for key, value in group["dict"]]}


def _joined(parts: list[Snapshot], order: Mapping[str, int]) -> Snapshot:
    """Snapshots of different tensors as one: the options of each group are those of the first."""
    texts = [json.loads(part.optimizer) for part in parts]
    if len({len(text["groups"]) for text in texts}) > 1:
        raise ForeignRun("stages that share layers have different numbers of parameter groups: make the same groups for each")
    groups = [
        _with_params(same[0], sorted([name for group in same for name in _params(group)], key=order.__getitem__))
        for same in zip(*(text["groups"] for text in texts), strict=True)
    ]
    state = {name: values for text in texts for name, values in text["state"].items()}
    tensors = {name: tensor for part in reversed(parts) for name, tensor in part.tensors.items()}
    return Snapshot(tensors, json.dumps({"kind": texts[0]["kind"], "groups": groups, "state": state}))
