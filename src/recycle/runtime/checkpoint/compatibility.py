"""`refuse_foreign`: whether a job can go on from a checkpoint. It must compute the same, but may have another shape.

The global batch must be the same: as many micro-batches in a step, of as many samples. Then pipelines, stages and shared layers
are free, if the stages of both say what their layers are.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recycle.core.errors import FileProblem, ForeignRun
from recycle.runtime.checkpoint.files import Checkpoint, find_checkpoints, plain, read_checkpoint
from recycle.runtime.checkpoint.layer_names import LayerNames, name_by_layer

PIPELINES, STAGES, MICROBATCHES, LAYERS = "pipelines", "stages", "microbatches", "layers"
BY_PIPELINE = "data_by_pipeline"
"""Whether the job's data are asked for by pipeline: a dataset is not, a source of micro-batches is."""
# Keys that do not say what is computed; earlier releases had those of the shape in `about`, too.
_OF_SHAPE = (LAYERS, BY_PIPELINE, *(f"cluster.{key}" for key in (PIPELINES, STAGES, MICROBATCHES)))
_BY_STAGE = (STAGES, "model", "ties")
_MISSING = object()


def refuse_foreign(checkpoint: Checkpoint, fingerprint: Mapping[str, Any]) -> None:
    """Raise if a job with this fingerprint would not compute what the job of the checkpoint did."""
    there, here = checkpoint.fingerprint, plain(fingerprint)
    _refuse_other_batch(checkpoint, there, here)
    old, new = _without(there, _OF_SHAPE), _without(here, _OF_SHAPE)
    if PIPELINES in old and PIPELINES in new:
        old, new = (_without(each, (PIPELINES, MICROBATCHES)) for each in (old, new))
    if any(old.get(key) != new.get(key) for key in _BY_STAGE) and STAGES in old:
        layers, wanted = checkpoint.layers, LayerNames.parse(here.get(LAYERS))
        if layers is not None and wanted is not None:
            old = _without(old, _BY_STAGE) | _by_layer(there, layers)
            new = _without(new, _BY_STAGE) | _by_layer(here, wanted)
        elif old[STAGES] != new.get(STAGES):
            raise ForeignRun(_other_stages(checkpoint, old[STAGES], new.get(STAGES), is_old=LAYERS not in there))
    for key, before, now in differing(old, new):
        what = f"its {key} is {before}, but this job's is {now}"
        raise ForeignRun(f"{checkpoint.folder} was made by another job: {what}; resume with the same job")


def keep_model_names(fingerprint: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """A job's fingerprint with the names that the tensors of the model have in the checkpoints that are in `folder`, if any."""
    here = LayerNames.parse(plain(fingerprint).get(LAYERS))
    for path in find_checkpoints(folder).values():
        try:
            there = read_checkpoint(path, checks_sizes=False).layers
        except FileProblem:
            continue
        if here is not None and there is not None and here.sources().keys() == there.sources().keys():
            return {**fingerprint, LAYERS: replace(here, model=there.model).to_json()}
        break
    return fingerprint


def fingerprint_of_layers(fingerprint: Mapping[str, Any], counts: Sequence[int]) -> Mapping[str, Any]:
    """The fingerprint of a checkpoint whose stages have so many layers each, from that of the job's own stages."""
    layers = LayerNames.parse(plain(fingerprint).get(LAYERS))
    assert layers is not None, "a job whose stages do not say what their layers are cannot move layers"
    moved, sources, model = layers.with_counts(counts), layers.sources(), fingerprint["model"]
    # Every name of a tensor, as in the `state_dict` of a stage; `moved` has one for each tensor.
    described = [
        {
            name_by_layer(number, name): model[sources[number, name][0]][sources[number, name][1]]
            for number, names in zip(own, of_stage, strict=True)
            for name in names
        }
        for own, of_stage in zip(moved.ranges, moved.stages, strict=True)
    ]
    places = [dict.fromkeys(moved.sources()[each] for each in tie) for tie in layers.ties]
    ties = [[list(place) for place in held] for held in places if len({stage for stage, _ in held}) > 1]
    return {**fingerprint, LAYERS: moved.to_json(), "model": described, "ties": ties}


def _refuse_other_batch(checkpoint: Checkpoint, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    if not {PIPELINES, MICROBATCHES} <= there.keys() & here.keys():
        return
    old, new = ((each[PIPELINES], each[MICROBATCHES]) for each in (there, here))
    if old[0] * old[1] != new[0] * new[1]:
        raise ForeignRun(
            f"{checkpoint.folder} was made with {old[0] * old[1]} micro-batches in a step ({old[0]} pipelines of {old[1]}), but "
            f"this job has {new[0] * new[1]} ({new[0]} of {new[1]}): choose pipelines and micro-batches with the product "
            f"{old[0] * old[1]}"
        )
    if old != new and here.get(BY_PIPELINE):
        raise ForeignRun(
            f"{checkpoint.folder} was made with {old[0]} pipelines, but this job has {new[0]}, and its data are micro-batches by "
            f"pipeline: resume with {old[0]} pipelines, or give a dataset, whose samples are numbered"
        )


def _other_stages(checkpoint: Checkpoint, old: Any, new: Any, is_old: bool) -> str:
    if is_old:
        why = "the checkpoint is of an earlier release, which does not say what layers its stages have"
        advice = f"resume with {old} stages, and its next checkpoint can be resumed with {new}"
    else:
        why = "a stage of it or of this job does not say what its layers are"
        advice = f"resume with {old} stages, or make each stage an nn.Sequential or give it a method split_into_layers()"
    return f"{checkpoint.folder} has {old} stages, but this job has {new}, and {why}: {advice}"


def _by_layer(fingerprint: Mapping[str, Any], layers: LayerNames) -> dict[str, Any]:
    """The description of the model by layers instead of stages."""
    model = fingerprint["model"]
    return {
        LAYERS: [
            {name: model[stage].get(there) for name, there in names.items()}
            for stage, of_stage in enumerate(layers.stages)
            for names in of_stage
        ],
        "ties": plain({"ties": sorted(layers.ties)})["ties"],
    }


def _without(fingerprint: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    made = {key: value for key, value in fingerprint.items() if key not in keys}
    if isinstance(about := made.get("about"), dict):
        made["about"] = {key: value for key, value in about.items() if key not in keys}
    return made


def differing(there: Mapping[str, Any], here: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield each key that differs, with both values; the keys of nested maps and lists of maps are joined by dots."""
    for key in dict.fromkeys([*here, *there]):
        old, new = there.get(key, _MISSING), here.get(key, _MISSING)
        old_parts, new_parts = _parts(old), _parts(new)
        if old_parts and new_parts:
            yield from differing(old_parts, new_parts, f"{above}{key}.")
        elif old != new or type(old) is not type(new):
            yield f"{above}{key}", _shown(old), _shown(new)


def _parts(value: object) -> Mapping[str, Any]:
    match value:
        case dict():
            return value
        case [dict(), *_]:
            return {str(number): part for number, part in enumerate(value)}
    return {}


def _shown(value: object) -> str:
    text = "not there" if value is _MISSING else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
