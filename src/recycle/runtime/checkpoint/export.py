"""`export_model`: the weights of a checkpoint of any shape as one model, with the names of the whole model."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from recycle.core.events.record_file import CHECKPOINTS
from recycle.runtime.checkpoint.files import Checkpoint, stage_file, step_folder
from recycle.runtime.checkpoint.model_formats import MODEL_CONFIG, SAFETENSORS, write_model
from recycle.runtime.checkpoint.resume import checked, latest
from recycle.runtime.checkpoint.state import OPTIMIZER_PREFIX
from recycle.runtime.checkpoint.tensor_file import load_tensors


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """A model that was written to a file or a folder."""

    path: Path
    num_steps: int
    num_tensors: int
    size_bytes: int


def export_model(run: Path | str, path: Path | str, num_steps: int | None = None, to: str = SAFETENSORS) -> ExportedModel:
    """Write the weights of a run's checkpoint as one model, without the state of the optimizer.

    The names are those of the stages' tensors, if they are unique in the model, and do not change when a run is resumed with
    other stages. Otherwise a name is the number of the layer and the name in the layer, as in an `nn.Sequential` of all layers.

    Args:
        run: The folder of the run, which was named by `--out` or by `recycle.train(..., out=...)`.
        path: The safetensors file to write, which is replaced if it is there; or the folder of another format, which must be new.
        num_steps: The checkpoint after so many steps; by default the newest whole one.
        to: The format: "safetensors"; "hf", a folder that `from_pretrained` loads, if a model of Hugging Face was trained; or
            "dcp", a folder of `torch.distributed.checkpoint` with the weights under "model".

    Returns:
        What was written.

    Raises:
        NoCheckpoint: The run has no whole checkpoint.
        FileProblem: There is no checkpoint after `num_steps` steps, it is torn, or the file cannot be written.

    Example:
        exported = recycle.export_model("runs/first", "model.safetensors")
        model.load_state_dict(safetensors.torch.load_file(exported.path))
    """
    folder = Path(run) / CHECKPOINTS
    checkpoint = latest(folder)[0] if num_steps is None else checked(folder / step_folder(num_steps))
    tensors = _model_tensors(checkpoint)
    metadata = {"format": "pt", "num_steps": str(checkpoint.num_steps)}
    size_bytes = write_model(to, Path(path), tensors, metadata, Path(run) / MODEL_CONFIG)
    return ExportedModel(Path(path), checkpoint.num_steps, len(tensors), size_bytes)


def _model_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    files = [_weights_in(checkpoint.folder / stage_file(number)) for number in range(len(checkpoint.files))]
    if (layers := checkpoint.layers) is not None:
        return {name: files[stage][there] for name, (stage, there) in layers.model_names().items()}
    # Stages that do not say what their layers are: the names in an `nn.Sequential` of stages, unless they are unique as they are.
    is_unique = sum(map(len, files)) == len({name for file in files for name in file})
    return {name if is_unique else f"{stage}.{name}": value for stage, file in enumerate(files) for name, value in file.items()}


def _weights_in(path: Path) -> dict[str, Tensor]:
    return {name: value for name, value in load_tensors(path)[0].items() if not name.startswith(OPTIMIZER_PREFIX)}
