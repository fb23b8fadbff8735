"""Checkpoints on disk: how they lie there, and what their manifests say.

    checkpoints/step-00000020/stage-0.safetensors
                              stage-1.safetensors
                              manifest.json

A checkpoint is whole if its manifest is there, and its files have the sizes and digests that the manifest says. Until then its
folder is called `step-00000020.partial`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recycle.core.errors import FileProblem
from recycle.core.files import read_json, write_text

FORMAT, VERSION = "recycle-checkpoint", 1
MANIFEST = "manifest.json"
PARTIAL = ".partial"
_STEP = re.compile(r"step-(\d{8,})")
_IN_PARTIAL = re.compile(r"step-\d{8,}\.partial/stage-\d{1,6}\.safetensors")
_IN_WHOLE = re.compile(r"step-\d{8,}/(stage-\d{1,6}\.safetensors|manifest\.json)")


@dataclass(frozen=True, slots=True)
class StageFile:
    """One file of a checkpoint, as its manifest has it."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint after so many steps; its files are those of its stages, in order."""

    num_steps: int
    folder: Path
    files: tuple[StageFile, ...]
    fingerprint: Mapping[str, Any]


def step_folder(num_steps: int) -> str:
    return f"step-{num_steps:08d}"


def stage_file(stage: int) -> str:
    return f"stage-{stage}.safetensors"


def is_to_be_written(name: str) -> bool:
    """Whether this names, from the folder of checkpoints, a stage's file of one that is not whole yet."""
    return bool(_IN_PARTIAL.fullmatch(name))


def is_to_be_read(name: str) -> bool:
    """Whether this names, from the folder of checkpoints, a file of a whole one."""
    return bool(_IN_WHOLE.fullmatch(name))


def stage_metadata(num_steps: int, stage: int) -> dict[str, str]:
    """What a stage's file says of itself; readers made by others look for the `format`."""
    return {"format": "pt", "recycle": f"{FORMAT} {VERSION}", "num_steps": str(num_steps), "stage": str(stage)}


def plain(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint as it comes back from JSON, where tuples are lists and keys are words."""
    made: dict[str, Any] = json.loads(json.dumps(fingerprint))
    return made


def write_manifest(checkpoint: Checkpoint) -> Path:
    """Say in the checkpoint's folder what belongs to it; return the path of what says so."""
    told = {
        "format": FORMAT,
        "version": VERSION,
        "num_steps": checkpoint.num_steps,
        "fingerprint": plain(checkpoint.fingerprint),
        "files": [asdict(file) for file in checkpoint.files],
    }
    path = checkpoint.folder / MANIFEST
    write_text(path, json.dumps(told, indent=1) + "\n")
    return path


def find_checkpoints(folder: Path, suffix: str = "") -> dict[int, Path]:
    """The folders in `folder` with the name of a checkpoint and `suffix`, by number of steps, the newest first."""
    try:
        paths = [path for path in folder.iterdir() if path.name.endswith(suffix) and path.is_dir()]
    except FileNotFoundError:
        return {}
    except OSError as problem:
        raise FileProblem(f"cannot read {folder}: {problem.strerror or problem}") from None
    found = {int(match[1]): path for path in paths if (match := _STEP.fullmatch(path.name.removesuffix(suffix)))}
    return dict(sorted(found.items(), reverse=True))


def read_checkpoint(folder: Path, stage: int | None = None) -> Checkpoint:
    """The checkpoint in `folder`; it is refused if its manifest is not in order, or a file has another size than that says.

    With a stage, only that one's file has to be there.
    """
    told = read_json(folder / MANIFEST, FORMAT, VERSION)
    match told:
        case {"num_steps": int(num_steps), "fingerprint": dict(fingerprint), "files": [*entries]}:
            files = tuple(_stage_file(folder, entry) for entry in entries)
        case _:
            raise FileProblem(f"{folder / MANIFEST} does not say what belongs to the checkpoint: it is corrupt")
    if folder.name != step_folder(num_steps):
        raise FileProblem(f"{folder / MANIFEST} is of another checkpoint, after {num_steps} steps")
    if not files or [file.name for file in files] != [stage_file(stage) for stage in range(len(files))]:
        raise FileProblem(f"{folder / MANIFEST} does not name one file a stage: it is corrupt")
    for file in files if stage is None else files[stage : stage + 1]:
        refuse_other_size(folder, file)
    return Checkpoint(num_steps, folder, files, fingerprint)


def is_whole(folder: Path) -> bool:
    """Whether there is a checkpoint with all its files, as far as their sizes tell."""
    try:
        read_checkpoint(folder)
    except FileProblem:
        return False
    return True


def _stage_file(folder: Path, entry: object) -> StageFile:
    match entry:
        case {"name": str(name), "size_bytes": int(size_bytes), "sha256": str(sha256)}:
            return StageFile(name, size_bytes, sha256)
    raise FileProblem(f"{folder / MANIFEST} does not say name, size and digest of each file: it is corrupt")


def refuse_other_size(folder: Path, file: StageFile) -> None:
    """Raise if `file` is not in `folder`, or not with all its bytes."""
    try:
        size_bytes = (folder / file.name).stat().st_size
    except OSError as problem:
        raise FileProblem(f"cannot read {folder / file.name}: {problem.strerror or problem}") from None
    if size_bytes != file.size_bytes:
        raise FileProblem(f"{folder / file.name} has {size_bytes} bytes, but was written with {file.size_bytes}")
