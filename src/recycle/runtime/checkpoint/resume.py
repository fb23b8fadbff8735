"""Loading checkpoints: `latest` finds the newest whole one, `load_stage` resumes a stage, `load` loads weights for other uses."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from recycle.core.errors import FileProblem, ForeignRun, NoCheckpoint, Uncuttable
from recycle.core.events.record_file import CHECKPOINTS, CONFIG
from recycle.runtime.checkpoint.compatibility import refuse_foreign
from recycle.runtime.checkpoint.files import (
    PARTIAL,
    Checkpoint,
    StageFile,
    find_checkpoints,
    read_checkpoint,
    refuse_other_size,
    stage_file,
    stage_metadata,
)
from recycle.runtime.checkpoint.layer_names import LayerNames, TensorSource, find_layer_names, layer_tensors_in
from recycle.runtime.checkpoint.layer_state import joined_snapshot
from recycle.runtime.checkpoint.state import Snapshot, put_back, put_weights
from recycle.runtime.checkpoint.tensor_file import load_tensors

Pulse = Callable[[int], None]
Loaded = tuple[Mapping[str, Tensor], Mapping[str, str]]
"""The tensors of a stage's file, and its metadata."""
_BLOCK_BYTES = 1 << 22


def latest(
    folder: Path, fingerprint: Mapping[str, Any] | None = None, mentions_unfinished: bool = True
) -> tuple[Checkpoint, list[str]]:
    """Return the newest whole checkpoint in `folder`, every byte checked, and a sentence for each newer one that is not whole.

    With a fingerprint, a checkpoint of another job is refused. While workers still write, an unfinished one is not worth a word.
    """
    unfinished = find_checkpoints(folder, PARTIAL) if mentions_unfinished else {}
    not_whole = {number: f"checkpoint {path.name} was not finished" for number, path in unfinished.items()}
    for number, path in find_checkpoints(folder).items():
        try:
            checkpoint = checked(path, fingerprint)
        except FileProblem as problem:
            not_whole[number] = f"checkpoint {path.name} is torn: {problem}"
            continue
        newer = [not_whole[other] for other in sorted(not_whole, reverse=True) if other > number]
        return checkpoint, [f"{problem}; {path.name} before it is used" for problem in newer]
    problems = "".join(f"; {not_whole[number]}" for number in sorted(not_whole, reverse=True))
    raise NoCheckpoint(f"there is no whole checkpoint in {folder}: start the run anew, without resuming{problems}")


def checked(folder: Path, fingerprint: Mapping[str, Any] | None = None) -> Checkpoint:
    """The checkpoint in `folder`, every byte of its files checked; with a fingerprint, one of another job is refused."""
    checkpoint = read_checkpoint(folder)
    if fingerprint is not None:
        refuse_foreign(checkpoint, fingerprint)
    for file in checkpoint.files:
        _refuse_other_bytes(folder, file)
    return checkpoint


def _refuse_other_bytes(folder: Path, file: StageFile, pulse: Pulse = lambda num_bytes: None) -> None:
    """Raise if a file does not have the bytes of which the manifest has the digest."""
    path, digest = folder / file.name, hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
                pulse(len(block))
    except OSError as problem:
        raise FileProblem(f"cannot read {path}: {problem.strerror or problem}") from None
    file.refuse_other_digest(path, digest.hexdigest())


def load_stage(
    checkpoint: Checkpoint,
    stage: int,
    module: nn.Module,
    optimizer: Optimizer,
    pulse: Pulse = lambda num_bytes: None,
    layers: LayerNames | None = None,
) -> None:
    """Load the state of `stage` into `module` and `optimizer` in place: parameters, buffers, optimizer state and settings.

    Every byte is checked first; `pulse` is called with the size of each part. `layers` are those of the stages of this job, which
    may be others than those of the checkpoint.
    Buffers that are not in the module's `state_dict` are not in a checkpoint.
    """

    def read(number: int) -> Loaded:
        refuse_other_size(checkpoint.folder, checkpoint.files[number])
        _refuse_other_bytes(checkpoint.folder, checkpoint.files[number], pulse)
        return load_tensors(checkpoint.folder / stage_file(number))

    put_stage(checkpoint, read, stage, module, optimizer, layers)


def put_stage(
    checkpoint: Checkpoint,
    read: Callable[[int], Loaded],
    stage: int,
    module: nn.Module,
    optimizer: Optimizer,
    layers: LayerNames | None = None,
) -> None:
    """Load a stage, and its guests, as `load_stage` does; `read` reads the file of a stage, here or from another machine."""
    folder = checkpoint.folder

    def snapshot(number: int) -> Snapshot:
        return _snapshot(folder / stage_file(number), read(number), checkpoint.num_steps, number)

    try:
        if layers is None:
            assert stage < len(checkpoint.files), f"the checkpoint has {len(checkpoint.files)} stages, and none is {stage}"
            put_back(snapshot(stage), module, optimizer)
            return
        sources = _sources(checkpoint, stage, module, layers)
        # A stage without tensors reads some file, too, for the scale of the loss.
        files = sorted({file for file, _ in sources.values()}) or [0]
        put_back(joined_snapshot({number: snapshot(number) for number in files}, sources, module, optimizer), module, optimizer)
    except ForeignRun as problem:
        raise ForeignRun(f"stage {stage} cannot be loaded from {folder}: {problem}") from None


def _sources(checkpoint: Checkpoint, stage: int, module: nn.Module, layers: LayerNames) -> dict[str, TensorSource]:
    """The file, and the name there, of each tensor of a stage, by its name in the stage."""
    there = checkpoint.layers
    # With the same files, the names are those of this job, also if it splits its stages into other layers than before.
    known = (layers if there is None or there.files() == layers.files() else there).sources()
    sources = {}
    for name, tensor in layer_tensors_in(module, layers.ranges[stage]).items():
        if tensor not in known:
            raise ForeignRun(f"the checkpoint has no {tensor[1]} of layer {tensor[0]}, which this job trains")
        sources[name] = known[tensor]
    return sources


def _snapshot(path: Path, loaded: Loaded, num_steps: int, stage: int) -> Snapshot:
    tensors, metadata = loaded
    if not stage_metadata(num_steps, stage).items() <= metadata.items() or "optimizer" not in metadata:
        raise FileProblem(f"{path} does not hold stage {stage} after {num_steps} steps, but something else")
    return Snapshot(tensors, metadata["optimizer"])


def load(stages: Sequence[nn.Module], run: Path | str) -> int:
    """Load the weights of a run's newest whole checkpoint into the stages, in place.

    Args:
        stages: The modules of all stages in order. If they say what their layers are, they may be cut otherwise than those that
            were trained. A model that `recycle.cut` cut shares its parameters with its stages, so that the whole model is loaded
            with them.
        run: The folder of the run, which was named by `--out` or by `recycle.train(..., out=...)`.

    Returns:
        The number of steps after which the checkpoint was written.

    Raises:
        NoCheckpoint: The run has no whole checkpoint.
        ForeignRun: The run trained other layers, or tensors of other names, shapes or dtypes.
        Uncuttable: There are more or fewer stages than were trained, and one does not say what its layers are.

    Example:
        num_steps = recycle.load(recycle.cut(model, [2, 4]), "runs/first")
    """
    checkpoint, _ = latest(Path(run) / CHECKPOINTS)
    layers, is_cut_alike = None, len(stages) == len(checkpoint.files)
    if checkpoint.layers is not None:
        try:
            layers = find_layer_names(stages)
        except Uncuttable:
            if not is_cut_alike:
                raise
    elif not is_cut_alike:
        raise ForeignRun(f"{run} trained {len(checkpoint.files)} stages, but {len(stages)} are to be loaded: cut the model alike")
    for number, module in enumerate(stages):
        try:
            put_weights(_weights(checkpoint, number, module, layers), module)
        except ForeignRun as problem:
            raise ForeignRun(f"stage {number} cannot be loaded from {checkpoint.folder}: {problem}") from None
    return checkpoint.num_steps


def _weights(checkpoint: Checkpoint, stage: int, module: nn.Module, layers: LayerNames | None) -> Mapping[str, Tensor]:
    if layers is None:
        return load_tensors(checkpoint.folder / stage_file(stage))[0]
    sources = _sources(checkpoint, stage, module, layers)
    tensors = {file: load_tensors(checkpoint.folder / stage_file(file))[0] for file in {file for file, _ in sources.values()}}
    return {name: tensors[file][there] for name, (file, there) in sources.items()}


def how_to_resume(folder: Path | None) -> str:
    """Say how the run in a folder goes on: `recycle train` has left its configuration there, and `recycle.train` has none."""
    if folder is not None and (folder / CONFIG).exists():
        return f"recycle train --resume {folder}"
    return f"recycle.train(..., out={str(folder)!r}, options=TrainOptions(checkpoint=CheckpointOptions(resume=True)))"
