"""The state of a stage and its layers: a stage's file has no guests, and a stage is joined from the files that have its layers.

So a checkpoint is the same whatever layers are shared, and a run can resume with other stages and other shared layers. In the
same way a stage is joined from layers that other workers send: then tensors are named by layer, the same at every stage.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recycle.core.errors import FileProblem, ForeignRun
from recycle.runtime.checkpoint.layer_names import TensorSource, layer_tensors_in, name_by_layer
from recycle.runtime.checkpoint.state import OPTIMIZER_PREFIX, Snapshot, optimizer_names, text_of_group
from recycle.runtime.compute.elastic_stage import OWN, ElasticStage, held_layers, named_tensors
from recycle.runtime.compute.optimizer_step import LOSS_SCALE

_PARAMS = "params"


def without_guests(snapshot: Snapshot, module: nn.Module) -> Snapshot:
    """The part of a stage's snapshot that its file has, with the names of the user's module."""
    if not isinstance(module, ElasticStage):
        return snapshot
    text = json.loads(snapshot.optimizer)
    names = {f"{OWN}{name}": name for name in module.own.state_dict()}
    tensors = {new: snapshot.tensors[old] for old, new in names.items() if old in snapshot.tensors}
    state = {
        names[old]: _with_tensors(values, f"{OPTIMIZER_PREFIX}{old}", f"{OPTIMIZER_PREFIX}{names[old]}", snapshot, tensors)
        for old, values in text["state"].items()
        if old in names
    }
    groups = [_with_params(group, [names[old] for old in _params(group) if old in names]) for group in text["groups"]]
    for number, group in enumerate(groups):
        _with_tensors(group, _group_prefix(number), _group_prefix(number), snapshot, tensors)
    return Snapshot(tensors, json.dumps({"kind": text["kind"], "groups": groups, "state": state}))


def joined_snapshot(
    snapshots: Mapping[int, Snapshot], sources: Mapping[str, TensorSource], module: nn.Module, optimizer: Optimizer
) -> Snapshot:
    """The snapshot of a stage from those of files: `sources` has the file, and the name there, of each tensor of `module`.

    Each parameter keeps its state. The options of a parameter group are those that all its parameters had.
    """
    files = {number: _OptimizerOfFile(number, snapshot) for number, snapshot in snapshots.items()}
    tensors = {new: _tensor_of(snapshots, *source) for new, source in sources.items()}
    names, state, groups = iter(optimizer_names(module, optimizer)), {}, []
    stepped = set[str]()
    # It is the same at all stages: one without parameters has it from any other.
    of_files = (dict(group["dict"]) for file in files.values() for group in file.groups)
    scale = next((group[LOSS_SCALE] for group in of_files if LOSS_SCALE in group), None)
    for number, group in enumerate(optimizer.param_groups):
        params = [next(names) for _ in group[_PARAMS]]
        stepped.update(params)
        had = [(files[file], files[file].group_of(old)) for file, old in (sources[name] for name in params)]
        for name in params:
            file, old = sources[name]
            if (values := files[file].state.get(old)) is not None:
                prefixes = f"{OPTIMIZER_PREFIX}{old}", f"{OPTIMIZER_PREFIX}{name}"
                state[name] = _with_tensors(values, *prefixes, snapshots[file], tensors)
        if not had:
            own = text_of_group(group, [], number, tensors)
            groups.append({"dict": [[key, scale if key == LOSS_SCALE else value] for key, value in own["dict"]]})
            continue
        _refuse_other_options(number, had)
        first, there = had[0]
        made = _with_tensors(first.groups[there], _group_prefix(there), _group_prefix(number), first.snapshot, tensors)
        groups.append(_with_params(made, params))
    _refuse_unstepped(module, stepped, sources, files)
    kinds = sorted({files[sources[name][0]].kind for name in stepped}) or [type(optimizer).__qualname__]
    if len(kinds) > 1:
        raise ForeignRun(f"its layers were stepped with {' and '.join(kinds)}: give those layers to different stages, as before")
    return Snapshot(tensors, json.dumps({"kind": kinds[0], "groups": groups, "state": state}))


def snapshot_by_layer(snapshot: Snapshot, module: nn.Module, own_layers: range) -> Snapshot:
    """The snapshot of a stage with its tensors named by layer, those of guests included.

    A tensor that several of its layers have is there for each of them, so that each layer is complete.
    """
    stage_names: dict[int, str] = {}
    for name, value in named_tensors(module):
        stage_names.setdefault(id(value), name)
    names: dict[str, list[str]] = {}
    for number, layer in held_layers(module, own_layers).items():
        for name, value in named_tensors(layer):
            names.setdefault(stage_names[id(value)], []).append(name_by_layer(number, name))
    tensors = {new: snapshot.tensors[old] for old, news in names.items() for new in news}
    text = json.loads(snapshot.optimizer)
    state = {
        new: _with_tensors(values, f"{OPTIMIZER_PREFIX}{old}", f"{OPTIMIZER_PREFIX}{new}", snapshot, tensors)
        for old, values in text["state"].items()
        for new in names[old]
    }
    groups = [_with_params(group, [new for old in _params(group) for new in names[old]]) for group in text["groups"]]
    for number, group in enumerate(groups):
        _with_tensors(group, _group_prefix(number), _group_prefix(number), snapshot, tensors)
    return Snapshot(tensors, json.dumps({"kind": text["kind"], "groups": groups, "state": state}))


def only_layers(snapshot: Snapshot, layers: Collection[int]) -> Snapshot:
    """The part of a snapshot by layer that some layers have."""
    text = json.loads(snapshot.optimizer)
    tensors = {name: value for name, value in snapshot.tensors.items() if _is_of(name, layers)}
    state = {
        name: _with_tensors(values, OPTIMIZER_PREFIX, OPTIMIZER_PREFIX, snapshot, tensors)
        for name, values in text["state"].items()
        if _is_of(name, layers)
    }
    groups = [_with_params(group, [name for name in _params(group) if _is_of(name, layers)]) for group in text["groups"]]
    for number, group in enumerate(groups):
        _with_tensors(group, _group_prefix(number), _group_prefix(number), snapshot, tensors)
    return Snapshot(tensors, json.dumps({"kind": text["kind"], "groups": groups, "state": state}))


def with_layers(snapshot: Snapshot, others: Snapshot) -> Snapshot:
    """A snapshot by layer with the layers of another one; the parameter groups of both stay apart."""
    text, more = json.loads(snapshot.optimizer), json.loads(others.optimizer)
    tensors = {**others.tensors, **snapshot.tensors}
    first = len(text["groups"])
    groups = [
        _with_tensors(group, _group_prefix(number), _group_prefix(first + number), others, tensors)
        for number, group in enumerate(more["groups"])
    ]
    joined = {"kind": text["kind"], "groups": [*text["groups"], *groups], "state": {**more["state"], **text["state"]}}
    return Snapshot(tensors, json.dumps(joined))


def _is_of(name: str, layers: Collection[int]) -> bool:
    number = name.partition(".")[0]
    return number.isdecimal() and int(number) in layers


def snapshot_of_stage(
    parts: Sequence[tuple[Collection[int], Snapshot]], module: nn.Module, own_layers: range, optimizer: Optimizer
) -> Snapshot:
    """The snapshot of a stage from snapshots by layer, each with the layers that it has."""
    sources = {}
    for name, (number, in_layer) in layer_tensors_in(module, own_layers).items():
        part = next(index for index, (layers, _) in enumerate(parts) if number in layers)
        sources[name] = part, name_by_layer(number, in_layer)
    return joined_snapshot({index: snapshot for index, (_, snapshot) in enumerate(parts)}, sources, module, optimizer)


class _OptimizerOfFile:
    """The optimizer of a stage, as its file has it."""

    def __init__(self, stage: int, snapshot: Snapshot) -> None:
        text = json.loads(snapshot.optimizer)
        self.stage, self.snapshot = stage, snapshot
        self.kind, self.groups, self.state = text["kind"], text["groups"], text["state"]
        self._group_of = {name: number for number, group in enumerate(self.groups) for name in _params(group)}

    def holds(self, name: str) -> bool:
        return name in self._group_of

    def group_of(self, name: str) -> int:
        if name not in self._group_of:
            raise ForeignRun(f"no optimizer stepped {name} of stage {self.stage} in the checkpoint, but this job's does")
        return self._group_of[name]

    def options(self, number: int) -> dict[str, Any]:
        """The options of a group; tensors by their values."""
        return {key: self._plain(value) for key, value in self.groups[number]["dict"] if key != _PARAMS}

    def _plain(self, value: Any) -> Any:
        match value:
            case {"tensor": name}:
                tensor = self.snapshot.tensors[name]
                return [str(tensor.dtype), tensor.tolist()]
            case dict():
                return {key: self._plain(part) for key, part in value.items()}
            case list():
                return [self._plain(part) for part in value]
        return value


def _refuse_other_options(number: int, had: list[tuple[_OptimizerOfFile, int]]) -> None:
    """Raise if the parameters of a group come from groups whose options differ."""
    seen = {(file.stage, group): file.options(group) for file, group in had}
    (first, options), *others = seen.items()
    for (stage, _), other in others:
        for key in sorted(options.keys() | other.keys()):
            if options.get(key) != other.get(key):
                raise ForeignRun(
                    f"parameter group {number} of this job joins parameters whose groups differ in the checkpoint, {key} is "
                    f"{options.get(key)} at stage {first[0]} and {other.get(key)} at stage {stage}: make a group for each"
                )


def _refuse_unstepped(
    module: nn.Module, stepped: set[str], sources: Mapping[str, TensorSource], files: Mapping[int, _OptimizerOfFile]
) -> None:
    for name, _ in module.named_parameters():
        file, old = sources[name]
        if name not in stepped and files[file].holds(old):
            raise ForeignRun(f"an optimizer stepped {old} of stage {file} in the checkpoint, but this job's does not")


def _tensor_of(snapshots: Mapping[int, Snapshot], file: int, name: str) -> Any:
    if name not in snapshots[file].tensors:
        raise FileProblem(f"the file of stage {file} has no {name}, which the manifest says it has")
    return snapshots[file].tensors[name]


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


def _group_prefix(number: int) -> str:
    return f"{OPTIMIZER_PREFIX}group {number}"


def _params(group: Mapping[str, Any]) -> list[str]:
    return next(names for key, names in group["dict"] if key == _PARAMS)


def _with_params(group: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {"dict": [[key, names if key == _PARAMS else value] for key, value in group["dict"]]}
