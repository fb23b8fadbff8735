"""Loading checkpoints: `latest` finds the newest whole one, `load_stage` resumes a stage, `load` loads weights for other uses."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from recycle.core.errors import FileProblem, ForeignRun, NoCheckpoint
from recycle.core.events.record_file import CHECKPOINTS
from recycle.runtime.checkpoint.files import (
    PARTIAL,
    Checkpoint,
    StageFile,
    find_checkpoints,
    plain,
    read_checkpoint,
    stage_file,
    stage_metadata,
)
from recycle.runtime.checkpoint.guests import with_guests
from recycle.runtime.checkpoint.state import Snapshot, put_back, put_weights
from recycle.runtime.checkpoint.tensor_file import load_tensors
from recycle.runtime.compute.elastic_stage import ElasticStage

Pulse = Callable[[int], None]
Loaded = tuple[Mapping[str, Tensor], Mapping[str, str]]
"""The tensors of a stage's file, and its metadata."""
_MISSING = object()
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
            checkpoint = read_checkpoint(path)
            if fingerprint is not None:
                _refuse_foreign(checkpoint, plain(fingerprint))
            for file in checkpoint.files:
                _refuse_other_bytes(path, file)
        except FileProblem as problem:
            not_whole[number] = f"checkpoint {path.name} is torn: {problem}"
            continue
        newer = [not_whole[other] for other in sorted(not_whole, reverse=True) if other > number]
        return checkpoint, [f"{problem}; {path.name} before it is used" for problem in newer]
    problems = "".join(f"; {not_whole[number]}" for number in sorted(not_whole, reverse=True))
    raise NoCheckpoint(f"there is no whole checkpoint in {folder}: start the run anew, without resuming{problems}")


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


def _refuse_foreign(checkpoint: Checkpoint, fingerprint: Mapping[str, Any]) -> None:
    for key, there, here in differing(checkpoint.fingerprint, fingerprint):
        what = f"its {key} is {there}, but this job's is {here}"
        raise ForeignRun(f"{checkpoint.folder} was made by another job: {what}; resume with the same job")


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


def load_stage(
    checkpoint: Checkpoint, stage: int, module: nn.Module, optimizer: Optimizer, pulse: Pulse = lambda num_bytes: None
) -> None:
    """Load the state of `stage` into `module` and `optimizer` in place: parameters, buffers, optimizer state and settings.

    Every byte is checked first; `pulse` is called with the size of each part.
    Buffers that are not in the module's `state_dict` are not in a checkpoint.
    """
    assert 0 <= stage < len(checkpoint.files), f"the checkpoint has {len(checkpoint.files)} stages, and none is {stage}"

    def read(number: int) -> Loaded:
        _refuse_other_bytes(checkpoint.folder, checkpoint.files[number], pulse)
        return load_tensors(checkpoint.folder / stage_file(number))

    put_stage(checkpoint.folder, read, checkpoint.num_steps, stage, module, optimizer)


def put_stage(
    folder: Path,
    read: Callable[[int], Loaded],
    num_steps: int,
    stage: int,
    module: nn.Module,
    optimizer: Optimizer,
) -> None:
    """Load a stage, and its guests, as `load_stage` does; `read` reads the file of a stage, here or from another machine."""
    homes = module.homes if isinstance(module, ElasticStage) else []
    snapshots = {number: _snapshot(folder / stage_file(number), read(number), num_steps, number) for number in [stage, *homes]}
    try:
        put_back(with_guests(snapshots, stage, module), module, optimizer)
    except ForeignRun as problem:
        raise ForeignRun(f"stage {stage} cannot be loaded from {folder}: {problem}") from None


def _snapshot(path: Path, loaded: Loaded, num_steps: int, stage: int) -> Snapshot:
    tensors, metadata = loaded
    if not stage_metadata(num_steps, stage).items() <= metadata.items() or "optimizer" not in metadata:
        raise FileProblem(f"{path} does not hold stage {stage} after {num_steps} steps, but something else")
    return Snapshot(tensors, metadata["optimizer"])


def load(stages: Sequence[nn.Module], run: Path | str) -> int:
    """Load the weights of a run's newest whole checkpoint into the stages, in place.

    Args:
        stages: The modules of all stages in order, cut like those that were trained. A model that `recycle.cut` cut shares its
            parameters with its stages, so that the whole model is loaded with them.
        run: The folder of the run, which was named by `--out` or by `recycle.train(..., out=...)`.

    Returns:
        The number of steps after which the checkpoint was written.

    Raises:
        NoCheckpoint: The run has no whole checkpoint.
        ForeignRun: The run trained another number of stages, or tensors of other names, shapes or dtypes.

    Example:
        num_steps = recycle.load(recycle.cut(model, num_stages=4), "runs/first")
    """
    checkpoint, _ = latest(Path(run) / CHECKPOINTS)
    if len(stages) != len(checkpoint.files):
        raise ForeignRun(f"{run} trained {len(checkpoint.files)} stages, but {len(stages)} are to be loaded: cut the model alike")
    for number, module in enumerate(stages):
        tensors, _ = load_tensors(checkpoint.folder / stage_file(number))
        try:
            put_weights(tensors, module)
        except ForeignRun as problem:
            raise ForeignRun(f"stage {number} cannot be loaded from {checkpoint.folder}: {problem}") from None
    return checkpoint.num_steps
