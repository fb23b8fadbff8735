"""`load_model`: weights from outside into the stages of a model, by the names that they have in the whole model."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from recycle.core.errors import ForeignRun
from recycle.runtime.checkpoint.layer_names import find_layer_names
from recycle.runtime.checkpoint.model_formats import read_model
from recycle.runtime.checkpoint.state import put_weights


def load_model(stages: Sequence[nn.Module], path: Path | str) -> None:
    """Load the weights of a model into the stages, in place; training starts from them.

    Args:
        stages: The modules of all stages in order; each must say what its layers are, as those of `recycle.cut` do.
        path: A safetensors file, a folder of Hugging Face, or one of torch.distributed.checkpoint, as `recycle export` writes.

    Raises:
        FileProblem: There is no model at `path`, or it cannot be read.
        ForeignRun: It is another model: a tensor is missing, is too many, or has another shape or dtype.
        Uncuttable: A stage does not say what its layers are.

    Example:
        recycle.load_model(recycle.cut(model, stages=4), "exported")
    """
    names, found = find_layer_names(stages).model_names(), read_model(Path(path))
    own = {name: dict(stages[stage].state_dict(keep_vars=True))[there] for name, (stage, there) in names.items()}
    missing = [name for name in names if name not in found and not _is_tied(own[name], own, found)]
    if missing:
        raise ForeignRun(f"{path} holds another model: it has no {missing[0]}, which this model has")
    if foreign := sorted(found.keys() - names.keys()):
        raise ForeignRun(f"{path} holds another model: it has {foreign[0]}, which this model has not")
    for number, stage in enumerate(stages):
        here = {there: found[name] for name, (of, there) in names.items() if of == number and name in found}
        tied = {
            there: found[_tied_name(own[name], own, found)]
            for name, (of, there) in names.items()
            if of == number and name not in found
        }
        try:
            put_weights({**here, **tied}, stage)
        except ForeignRun as problem:
            raise ForeignRun(f"stage {number} cannot be loaded from {path}: {problem}") from None


def _is_tied(tensor: Tensor, own: dict[str, Tensor], found: dict[str, Tensor]) -> bool:
    """Whether another name of the same tensor was found: Hugging Face writes one of them."""
    return any(other is tensor and name in found for name, other in own.items())


def _tied_name(tensor: Tensor, own: dict[str, Tensor], found: dict[str, Tensor]) -> str:
    return next(name for name, other in own.items() if other is tensor and name in found)
