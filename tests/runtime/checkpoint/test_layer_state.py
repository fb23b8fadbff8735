"""State by layers: files have no guests, and a stage of any shape is joined from files of any other with the same state."""

import json
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recycle.core.errors import FileProblem, ForeignRun
from recycle.models.gpt import GptConfig, gpt_stages
from recycle.runtime.checkpoint.layer_names import find_layer_names, layer_tensors_in
from recycle.runtime.checkpoint.layer_state import joined_snapshot, without_guests
from recycle.runtime.checkpoint.state import Snapshot, put_back, take_snapshot
from recycle.runtime.compute.elastic_stage import elastic_stages, own_module
from recycle.runtime.compute.optimizer_step import Stepper
from recycle.runtime.worker.worker_spec import copied_stage


def groups_of(parameters: list[Tensor]) -> list[dict[str, Any]]:
    """Biases have no decay, as is usual."""
    return [
        {"params": [each for each in parameters if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.dim() == 1], "weight_decay": 0.0},
    ]


def by_need(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Only groups that have a parameter: stages may have different numbers of them."""
    return torch.optim.AdamW([group for group in groups_of(parameters) if group["params"]], lr=0.1)


OPTIMIZERS = {
    "AdamW in groups": lambda parameters: torch.optim.AdamW(groups_of(parameters), lr=0.1),
    "AdamW in groups where there is need": by_need,
    "Adam with a tensor as its rate": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1)),
    "NAdam": partial(torch.optim.NAdam, lr=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.1, momentum=0.5, centered=True),
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
CONFIG = GptConfig(vocabulary=8, context=4, width=4, num_heads=1, num_layers=5, ties_embeddings=True)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))


def sequential(sizes: Sequence[int]) -> list[nn.Module]:
    """Six layers in stages of these sizes; each stage has names of its own, and one layer has no parameter."""
    torch.manual_seed(1)
    layers = [*(block() for _ in range(4)), nn.Tanh(), nn.Linear(3, 3)]
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return [nn.Sequential(*layers[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


def tied_gpt(sizes: Sequence[int]) -> list[nn.Module]:
    return gpt_stages(CONFIG, len(sizes), 1, layers=sizes)


SHAPES = {
    sequential: ([6], [2, 4], [1, 1, 1, 1, 1, 1]),
    tied_gpt: ([5], [2, 3], [1, 3, 1]),
}


def stepped(module: nn.Module, make_optimizer: Any, num_steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The module after steps with gradients that depend on the values of each parameter alone."""
    parameters = list(module.parameters())
    stepper = Stepper(parameters, make_optimizer)
    for step in range(num_steps):
        stepper.step(step, lambda first, end, step=step: [parameter.detach().sin() + step for parameter in parameters], 1.0)
    return module, stepper.optimizer


def files_of(stages: Sequence[nn.Module], make_optimizer: Any) -> dict[int, Snapshot]:
    return {number: take_snapshot(*stepped(copied_stage(stages, number), make_optimizer)) for number in range(len(stages))}


def is_same(found: Snapshot, wanted: Snapshot) -> bool:
    return (
        json.loads(found.optimizer) == json.loads(wanted.optimizer)
        and found.tensors.keys() == wanted.tensors.keys()
        and all(torch.equal(found.tensors[name], wanted.tensors[name]) for name in wanted.tensors)
    )


def joined(files: dict[int, Snapshot], old: Sequence[nn.Module], stages: Sequence[nn.Module], number: int, make: Any) -> Snapshot:
    """The snapshot of a stage of one shape after it was loaded from the files of another."""
    module, optimizer = stepped(copied_stage(stages, number), make, 0)
    known = find_layer_names(old).sources()
    own_layers = find_layer_names([own_module(stage) for stage in stages]).ranges[number]
    sources = {name: known[tensor] for name, tensor in layer_tensors_in(module, own_layers).items()}
    put_back(joined_snapshot(files, sources, module, optimizer), module, optimizer)
    return take_snapshot(module, optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("make", SHAPES)
def test_every_stage_of_another_shape_gets_the_state_that_training_in_that_shape_gives(name: str, make: Any) -> None:
    make_optimizer = OPTIMIZERS[name]
    for old, new, shared in product(SHAPES[make], SHAPES[make], (0, 1)):
        files, stages = files_of(make(old), make_optimizer), make(new)
        held = elastic_stages(stages, shared) if shared else stages
        for number in range(len(new)):
            wanted = take_snapshot(*stepped(copied_stage(held, number), make_optimizer))
            found = joined(files, make(old), held, number, make_optimizer)
            assert is_same(found, wanted), f"stage {number} of {new} with {shared} shared layers, from {old}"


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if not name.endswith("need")])
def test_files_are_those_of_stages_without_guests(name: str) -> None:
    stages = sequential([2, 3, 1])
    for number, held in enumerate(elastic_stages(stages, 1)):
        module, optimizer = stepped(copied_stage([held], 0), OPTIMIZERS[name])
        plain = take_snapshot(*stepped(copied_stage(stages, number), OPTIMIZERS[name]))
        assert is_same(without_guests(take_snapshot(module, optimizer), module), plain)


def test_stages_without_guests_are_left_as_they_are() -> None:
    snapshot = Snapshot({}, "{}")
    assert without_guests(snapshot, nn.Linear(2, 2)) is snapshot


# What cannot be joined.


def refusal(make_old: Any, make_new: Any) -> str:
    old, new = sequential([3, 3]), sequential([6])
    with pytest.raises(ForeignRun) as refused:
        joined(files_of(old, make_old), old, new, 0, make_new)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_groups_with_other_options_are_not_joined() -> None:
    def by_size(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=len(parameters) / 100)

    assert "whose groups differ in the checkpoint, momentum is 0.15 at stage 0 and 0.07 at stage 1" in refusal(by_size, by_size)


def test_another_optimizer_and_other_parameters_to_step_are_refused() -> None:
    sgd, adam = OPTIMIZERS["SGD"], OPTIMIZERS["NAdam"]

    def matrices(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for each in parameters if each.dim() > 1], lr=0.1)

    assert "the checkpoint was made with SGD, but this job steps with NAdam" in refusal(sgd, adam)
    assert "no optimizer stepped 0.0.bias of stage 0 in the checkpoint, but this job's does" in refusal(matrices, sgd)
    assert "an optimizer stepped 0.0.bias of stage 0 in the checkpoint, but this job's does not" in refusal(sgd, matrices)


def test_stages_that_were_stepped_by_different_optimizers_are_not_joined() -> None:
    def by_size(parameters: list[Tensor]) -> torch.optim.Optimizer:
        kind = torch.optim.SGD if len(parameters) > 10 else torch.optim.AdamW
        return kind([{"params": parameters}], lr=0.1)

    old, new = sequential([3, 3]), sequential([6])
    files = files_of(old, by_size)
    text = json.loads(files[1].optimizer)
    options = json.loads(files[0].optimizer)["groups"][0]["dict"]
    params = next(value for key, value in text["groups"][0]["dict"] if key == "params")
    text["groups"] = [{"dict": [[key, params if key == "params" else value] for key, value in options]}]
    files[1] = Snapshot(files[1].tensors, json.dumps(text))
    with pytest.raises(ForeignRun, match=r"its layers were stepped with AdamW and SGD: give those layers to different stages"):
        joined(files, old, new, 0, OPTIMIZERS["SGD"])


def test_a_file_without_a_tensor_that_the_manifest_names_is_torn() -> None:
    old, new = sequential([3, 3]), sequential([6])
    files = files_of(old, OPTIMIZERS["SGD"])
    files[1] = Snapshot({name: value for name, value in files[1].tensors.items() if name != "2.weight"}, files[1].optimizer)
    with pytest.raises(FileProblem, match=r"the file of stage 1 has no 2\.weight, which the manifest says it has"):
        joined(files, old, new, 0, OPTIMIZERS["SGD"])
