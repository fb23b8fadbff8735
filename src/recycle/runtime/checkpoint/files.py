"""The layout of checkpoints on disk: names of folders and files, and the manifest that lists the files.

    checkpoints/step-00000020/stage-0.safetensors
                              stage-1.safetensors
                              manifest.json

A checkpoint is whole if it has a manifest, and its files have the sizes and digests in the manifest. The manifest also says which
layers of the model each stage has, by which a run resumes with other stages, and has a digest of itself. Until then its folder is
called `step-00000020.partial`, and every attempt to save a stage writes a file of its own there: `stage-0.1a2b3c4d.safetensors`.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recycle.core.errors import FileProblem
from recycle.core.files import read_json, write_text
from recycle.runtime.checkpoint.layer_names import LayerNames

FORMAT, VERSION = "recycle-checkpoint", 1
MANIFEST = "manifest.json"
PARTIAL = ".partial"
_STEP = re.compile(r"step-(\d{8,})", re.ASCII)
_IN_PARTIAL = re.compile(r"step-\d{8,}\.partial/stage-\d{1,6}\.[0-9a-f]{8}\.safetensors", re.ASCII)
_IN_WHOLE = re.compile(r"step-\d{8,}/(stage-\d{1,6}\.safetensors|manifest\.json)", re.ASCII)


@dataclass(frozen=True, slots=True)
class StageFile:
    """The manifest's entry for one file of a checkpoint."""

    name: str
    size_bytes: int
    sha256: str

    def refuse_other_digest(self, path: Path, found: str) -> None:
        """Raise if the bytes that were read at `path` have another digest."""
        if found != self.sha256:
            raise FileProblem(f"{path} does not have the bytes that were written: its SHA-256 is {found}, not {self.sha256}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint after `num_steps` steps, with one file for each stage, in order; and positions in the streams of the data."""

    num_steps: int
    folder: Path
    files: tuple[StageFile, ...]
    fingerprint: Mapping[str, Any]
    positions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layers(self) -> LayerNames | None:
        """The layers that each stage has; None if the job did not know them, or the checkpoint is of an earlier release."""
        return LayerNames.parse(self.fingerprint.get("layers"))


def step_folder(num_steps: int) -> str:
    return f"step-{num_steps:08d}"


def stage_file(stage: int) -> str:
    return f"stage-{stage}.safetensors"


def attempt_file(stage: int) -> str:
    """A new name for one attempt to save a stage: another worker that saves the same stage never replaces the file."""
    return f"stage-{stage}.{secrets.token_hex(4)}.safetensors"


def is_to_be_written(name: str) -> bool:
    """Whether `name`, relative to the folder of checkpoints, is a stage's file of a checkpoint that is not whole yet."""
    return bool(_IN_PARTIAL.fullmatch(name))


def is_to_be_read(name: str) -> bool:
    """Whether `name`, relative to the folder of checkpoints, is a file of a whole checkpoint."""
    return bool(_IN_WHOLE.fullmatch(name))


def stage_metadata(num_steps: int, stage: int) -> dict[str, str]:
    """The metadata of a stage's file; other programs that read safetensors look for the `format`."""
    return {"format": "pt", "recycle": f"{FORMAT} {VERSION}", "num_steps": str(num_steps), "stage": str(stage)}


def plain(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint as JSON returns it: tuples are lists, and keys are strings."""
    made: dict[str, Any] = json.loads(json.dumps(fingerprint))
    return made


def write_manifest(checkpoint: Checkpoint) -> Path:
    """Write the manifest into the checkpoint's folder; return its path."""
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "num_steps": checkpoint.num_steps,
        "fingerprint": plain(checkpoint.fingerprint),
        "files": [asdict(file) for file in checkpoint.files],
    }
    if checkpoint.positions:
        manifest["positions"] = dict(checkpoint.positions)
    path = checkpoint.folder / MANIFEST
    manifest["sha256"] = _digest(manifest)
    write_text(path, json.dumps(manifest, indent=1) + "\n")
    return path


def _digest(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def find_checkpoints(folder: Path, suffix: str = "") -> dict[int, Path]:
    """The checkpoints in `folder` whose names end in `suffix`: their folders by number of steps, the newest first."""
    try:
        paths = [path for path in folder.iterdir() if path.name.endswith(suffix) and path.is_dir()]
    except FileNotFoundError:
        return {}
    except OSError as problem:
        raise FileProblem(f"cannot read {folder}: {problem.strerror or problem}") from None
    found = {int(match[1]): path for path in paths if (match := _STEP.fullmatch(path.name.removesuffix(suffix)))}
    return dict(sorted(found.items(), reverse=True))


def read_checkpoint(folder: Path, checks_sizes: bool = True) -> Checkpoint:
    """Read the checkpoint in `folder`; raise if its manifest is invalid, or a file has another size than in the manifest."""
    checkpoint = _checkpoint_of(folder, read_json(folder / MANIFEST, FORMAT, VERSION))
    for file in checkpoint.files if checks_sizes else ():
        refuse_other_size(folder, file)
    return checkpoint


def parse_checkpoint(folder: Path, manifest: bytes) -> Checkpoint:
    """The checkpoint in `folder`, of which another machine has sent the manifest."""
    try:
        parsed = json.loads(manifest)
    except (ValueError, RecursionError) as problem:
        raise FileProblem(f"{folder / MANIFEST} is not JSON ({problem}): it is corrupt") from None
    return _checkpoint_of(folder, parsed)


def _checkpoint_of(folder: Path, manifest: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint in `folder` by its manifest; raise if the manifest is invalid."""
    match manifest:
        case {"num_steps": int(num_steps), "fingerprint": dict(fingerprint), "files": [*entries]}:
            files = tuple(_stage_file(folder, entry) for entry in entries)
        case _:
            raise FileProblem(f"{folder / MANIFEST} does not say what belongs to the checkpoint: it is corrupt")
    if folder.name != step_folder(num_steps):
        raise FileProblem(f"{folder / MANIFEST} is of another checkpoint, after {num_steps} steps")
    if not files or [file.name for file in files] != [stage_file(stage) for stage in range(len(files))]:
        raise FileProblem(f"{folder / MANIFEST} does not name one file a stage: it is corrupt")
    # Those of earlier releases have none. A changed name of a tensor would be found nowhere else.
    if manifest.get("sha256", digest := _digest(manifest)) != digest:
        raise FileProblem(f"{folder / MANIFEST} does not have the text that was written: its SHA-256 is {digest}")
    if not isinstance(positions := manifest.get("positions", {}), dict):
        raise FileProblem(f"{folder / MANIFEST} does not say how far the data were read: it is corrupt")
    return Checkpoint(num_steps, folder, files, fingerprint, positions)


def is_whole(folder: Path) -> bool:
    """Whether `folder` has a checkpoint with all its files in their right sizes."""
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
    """Raise if `file` is not in `folder`, or has another size than in the manifest."""
    try:
        size_bytes = (folder / file.name).stat().st_size
    except OSError as problem:
        raise FileProblem(f"cannot read {folder / file.name}: {problem.strerror or problem}") from None
    if size_bytes != file.size_bytes:
        raise FileProblem(f"{folder / file.name} has {size_bytes} bytes, but was written with {file.size_bytes}")
