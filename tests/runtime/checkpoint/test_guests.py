"""Guests in checkpoints: a stage's file is the same with and without them, and a stage is loaded whole from several files."""

import json
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recycle.core.errors import ForeignRun
from recycle.models.gpt import GptConfig, gpt_stages
from recycle.runtime.checkpoint.guests import with_guests, without_guests
from recycle.runtime.checkpoint.state import Snapshot, put_back, take_snapshot
from recycle.runtime.compute.elastic_stage import elastic_stages
from recycle.runtime.worker.worker_spec import copied_stage


def groups_of(parameters: list[Tensor]) -> list[dict[str, Any]]:
    """Biases have no decay, as is usual."""
    return [
        {"params": [each for each in parameters if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.dim() == 1], "weight_decay": 0.0},
    ]


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(groups_of(parameters), lr=0.1),
    "Adam with a tensor as its rate": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1)),
    "SGD": partial(torch.optim.SGD, lr=0.1),
}


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def stepped(module: nn.Module, make_optimizer: Any, num_steps: int = 2) -> tuple[nn.Module, Any]:
    """The module after steps with gradients that depend on the shapes and values of the parameters alone."""
    optimizer = make_optimizer(list(module.parameters()))
    for step in range(num_steps):
        for parameter in module.parameters():
            parameter.grad = parameter.detach().sin() + step
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_files_are_those_of_stages_without_guests_and_give_every_holder_the_same_state(name: str) -> None:
    make_optimizer = OPTIMIZERS[name]
    torch.manual_seed(1)
    stages = [nn.Sequential(block(), block()) for _ in range(3)]
    held = elastic_stages(stages, 1)
    plain = [take_snapshot(*stepped(copied_stage(stages, number), make_optimizer)) for number in range(3)]
    trained = [stepped(copied_stage(held, number), make_optimizer) for number in range(3)]
    for number, (module, optimizer) in enumerate(trained):
        saved = without_guests(take_snapshot(module, optimizer), module)
        assert saved.optimizer == plain[number].optimizer
        assert saved.tensors.keys() == plain[number].tensors.keys()
        assert all(torch.equal(saved.tensors[each], plain[number].tensors[each]) for each in saved.tensors)
    for number, (module, optimizer) in enumerate(trained):
        fresh, again = stepped(copied_stage(held, number), make_optimizer, 0)
        put_back(with_guests(dict(enumerate(plain)), number, fresh), fresh, again)
        found, wanted = take_snapshot(fresh, again), take_snapshot(module, optimizer)
        assert json.loads(found.optimizer) == json.loads(wanted.optimizer)
        assert all(torch.equal(found.tensors[each], wanted.tensors[each]) for each in wanted.tensors)


def test_a_parameter_that_a_stage_has_both_as_its_own_and_in_a_guest_is_loaded_once() -> None:
    torch.manual_seed(1)
    config = GptConfig(vocabulary=8, context=4, width=4, num_heads=1, num_layers=4, ties_embeddings=True)
    stages = gpt_stages(config, 2, 1, layers=[2, 2])
    held = elastic_stages(stages, 2)
    make_optimizer = OPTIMIZERS["AdamW"]
    plain = [take_snapshot(*stepped(copied_stage(stages, number), make_optimizer)) for number in range(2)]
    for number in range(2):
        wanted = take_snapshot(*stepped(copied_stage(held, number), make_optimizer))
        fresh, again = stepped(copied_stage(held, number), make_optimizer, 0)
        put_back(with_guests(dict(enumerate(plain)), number, fresh), fresh, again)
        found = take_snapshot(fresh, again)
        assert json.loads(found.optimizer) == json.loads(wanted.optimizer)
        assert all(torch.equal(found.tensors[each], wanted.tensors[each]) for each in wanted.tensors)


def test_stages_without_guests_are_left_as_they_are() -> None:
    module = nn.Linear(2, 2)
    snapshot = Snapshot({}, "{}")
    assert without_guests(snapshot, module) is snapshot
    assert with_guests({4: snapshot}, 4, module) is snapshot


def test_stages_whose_optimizers_have_other_groups_are_refused() -> None:
    stages = [nn.Sequential(nn.Linear(2, 2, bias=False)), nn.Sequential(nn.Linear(2, 2))]
    held = elastic_stages(stages, 1)

    def by_need(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD([group for group in groups_of(parameters) if group["params"]], lr=0.1)

    saved = {number: take_snapshot(*stepped(copied_stage(stages, number), by_need)) for number in range(2)}
    with pytest.raises(ForeignRun, match="different numbers of parameter groups"):
        with_guests(saved, 0, copied_stage(held, 0))
