"""Whole models in the formats of others: a folder of Hugging Face, and a checkpoint of torch.distributed.checkpoint (DCP).

A folder of Hugging Face needs the model's configuration, which a run keeps in its folder as `model_config.json`.
"""

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recycle.core.errors import FileProblem, UserError
from recycle.core.files import write_text
from recycle.runtime.checkpoint.tensor_file import load_tensors, save_tensors

SAFETENSORS, HUGGING_FACE, DCP = "safetensors", "hf", "dcp"
MODEL_FORMATS = (SAFETENSORS, HUGGING_FACE, DCP)
MODEL_CONFIG = "model_config.json"
"""In a run folder: the configuration of the model, if it has one."""
_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_DCP_METADATA = ".metadata"
# Under this key, as torch's own examples have it.
_DCP_MODEL = "model"


def model_config_text(stages: Iterable[nn.Module]) -> str | None:
    """The configuration of the model as JSON, if its stages have one: the text of their method `model_config()`."""
    for stage in stages:
        if (make := getattr(stage, "model_config", None)) is not None:
            return str(make())
    return None


def write_model(kind: str, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], config: Path) -> int:
    """Write a model in one of `MODEL_FORMATS`; return the bytes of its tensors. `config` is the file of its configuration.

    Raises:
        FileProblem: It cannot be written, or the configuration that Hugging Face needs is not there.
    """
    if kind == SAFETENSORS:
        return save_tensors(path, tensors, metadata)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileProblem(f"cannot write {path}: it is there already, and no empty folder; name another one")
    if kind == HUGGING_FACE:
        text = _config_text(config)
        size_bytes = save_tensors(path / _WEIGHTS, tensors, metadata)
        write_text(path / _CONFIG, text)
        return size_bytes
    if kind == DCP:
        return _write_dcp(path, tensors)
    raise UserError(f"{kind!r} is no format of a model: choose from {', '.join(MODEL_FORMATS)}")


def _config_text(path: Path) -> str:
    if not path.exists():
        raise FileProblem(
            f"{path} is missing, from which a folder of Hugging Face gets its config.json: the run trained no model of Hugging "
            f"Face that recycle.cut has cut; export it as {SAFETENSORS} or {DCP}"
        )
    try:
        text = path.read_text(encoding="utf-8")
        json.loads(text)
    except (OSError, ValueError) as problem:
        raise FileProblem(f"cannot read {path}: {problem}") from None
    return text


def _write_dcp(path: Path, tensors: Mapping[str, Tensor]) -> int:
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with _one_process():
            save({_DCP_MODEL: dict(tensors)}, checkpoint_id=str(path), no_dist=True)
    except OSError as problem:
        raise FileProblem(f"cannot write {path}: {problem.strerror or problem}") from None
    return sum(tensor.nbytes for tensor in tensors.values())


@contextmanager
def _one_process() -> Iterator[None]:
    """Have torch say nothing of the fact that one process is enough here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def read_model(path: Path) -> dict[str, Tensor]:
    """The tensors of a model, by their names in the model: of a safetensors file, a folder of Hugging Face, or one of DCP.

    torch keeps the description of a DCP folder as a pickle, which can run code: read only those that you trust.

    Raises:
        FileProblem: There is none of them, or it cannot be read.
    """
    if path.is_file():
        return load_tensors(path)[0]
    if (path / _DCP_METADATA).exists():
        return _read_dcp(path)
    if (path / _WEIGHTS).exists():
        return load_tensors(path / _WEIGHTS)[0]
    if (path / _INDEX).exists():
        return _read_shards(path)
    looked_for = (
        f"{_WEIGHTS} or {_INDEX}, as Hugging Face has them, and for {_DCP_METADATA}, as torch.distributed.checkpoint has it"
    )
    raise FileProblem(f"{path} holds no model: it is no safetensors file, and has none of what was looked for, {looked_for}")


def _read_shards(path: Path) -> dict[str, Tensor]:
    try:
        files = json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in files.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise FileProblem(f"{path / _INDEX} is no index of a model: {problem!r}") from None
    if outside := [name for name in names if Path(name).name != name]:
        raise FileProblem(f"{path / _INDEX} names {outside[0]}, which is not in its folder")
    return {name: tensor for file in names for name, tensor in load_tensors(path / file)[0].items()}


def _read_dcp(path: Path) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        known = FileSystemReader(str(path)).read_metadata().state_dict_metadata
        prefix = f"{_DCP_MODEL}." if any(name.startswith(f"{_DCP_MODEL}.") for name in known) else ""
        wanted: dict[str, Any] = {
            name: torch.empty(about.size, dtype=about.properties.dtype)
            for name, about in known.items()
            if name.startswith(prefix) and isinstance(about, TensorStorageMetadata)
        }
        with _one_process():
            load(wanted, checkpoint_id=str(path), no_dist=True)
    except Exception as problem:  # pickle, files and torch's own errors
        raise FileProblem(f"{path} cannot be read by torch.distributed.checkpoint: {problem!r}") from None
    return {name.removeprefix(prefix): tensor for name, tensor in wanted.items()}
