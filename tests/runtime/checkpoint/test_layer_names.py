"""Names of layers: which tensor of one shape is which of another, names of the whole model, and stages without layers."""

import json
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

import recycle
from recycle.core.errors import Uncuttable
from recycle.models.gpt import GptConfig, gpt_stages
from recycle.runtime.checkpoint.layer_names import LayerNames, find_layer_names
from recycle.runtime.cutting.cut import recut

CONFIG = GptConfig(vocabulary=8, context=4, width=4, num_heads=1, num_layers=4, ties_embeddings=True)


def linears(num: int) -> list[nn.Module]:
    return [nn.Linear(2, 2) for _ in range(num)]


def test_layers_are_numbered_through_all_stages_and_tensors_keep_their_names_in_them() -> None:
    found = find_layer_names([nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Sequential(nn.LayerNorm(2))])
    assert found.ranges == [range(2), range(2, 3)]
    assert found.sources() == {
        (0, "weight"): (0, "0.weight"),
        (0, "bias"): (0, "0.bias"),
        (2, "weight"): (1, "0.weight"),
        (2, "bias"): (1, "0.bias"),
    }
    assert found.files() == [{"0.weight", "0.bias"}, {"0.weight", "0.bias"}]
    assert LayerNames.parse(json.loads(json.dumps(found.to_json()))) == found
    assert LayerNames.parse(None) is None


@pytest.mark.parametrize("sizes", [[4], [2, 2], [1, 1, 2], [1, 1, 1, 1]])
def test_a_tied_model_has_the_same_tensors_ties_and_names_in_every_shape(sizes: list[int]) -> None:
    (whole,), found = gpt_stages(CONFIG, 1, 0), find_layer_names(gpt_stages(CONFIG, len(sizes), 0, layers=sizes))
    assert found.ties == (((0, "0.tokens.weight"), (3, "2.weight")),)
    assert found.sources().keys() == find_layer_names([whole]).sources().keys()
    assert found.model_names().keys() == whole.state_dict().keys()
    assert found.model == find_layer_names([whole]).model


def test_names_that_several_stages_have_become_those_of_a_sequential_of_all_layers() -> None:
    layers = linears(4)
    apart = find_layer_names([nn.Sequential(*layers[:3]), nn.Sequential(*layers[3:])])
    assert apart.model_names().keys() == nn.Sequential(*layers).state_dict().keys()
    named = nn.Sequential(OrderedDict(zip("abcd", layers, strict=True)))
    assert find_layer_names(recycle.cut(named, [1, 2])).model_names().keys() == named.state_dict().keys()


class Residual(nn.Module):
    """A stage that says its layers are its parts, whether that is so or not."""

    def __init__(self, *others: str) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        for name in others:
            setattr(self, name, nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.two(self.one(x))
        return made

    def split_into_layers(self) -> list[nn.Module]:
        return [self.one, self.two]


class Hidden(Residual):
    def split_into_layers(self) -> list[nn.Module]:
        return [self.one, self.two, nn.Linear(2, 2)]


def hooked() -> nn.Module:
    stage = nn.Sequential(*linears(2))
    stage.register_forward_hook(lambda module, given, made: None)
    return stage


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        (nn.Linear(2, 2), "a stage of type Linear cannot share layers: make it an nn.Sequential"),
        (Residual("three"), "stage 1 has three.bias in none of its layers: make it part of one"),
        (Hidden(), "a layer of stage 1 has weight, which the stage itself does not have"),
        (hooked(), "stage 1 has hooks, which its layers alone would not call"),
    ],
)
def test_a_stage_that_its_layers_do_not_make_up_is_refused(stage: nn.Module, sentence: str) -> None:
    with pytest.raises(Uncuttable, match=sentence):
        find_layer_names([nn.Sequential(*linears(1)), stage])


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_a_model_that_is_cut_again_has_the_same_layers_and_computes_the_same(num_stages: int) -> None:
    torch.manual_seed(1)
    stages = [nn.Sequential(*linears(2)), Residual(), nn.Sequential(nn.Tanh())]
    again = recut(stages, num_stages)
    x = torch.randn(3, 2)
    assert torch.equal(nn.Sequential(*again)(x), nn.Sequential(*stages)(x))
    assert len(again) == num_stages
    assert find_layer_names(again).sources().keys() == find_layer_names(stages).sources().keys()


def test_a_model_that_is_cut_again_keeps_the_names_of_its_modules() -> None:
    named = nn.Sequential(OrderedDict(zip("abcd", linears(4), strict=True)))
    assert [list(stage._modules) for stage in recut(recycle.cut(named, [1]), 3)] == [["a"], ["b"], ["c", "d"]]


def test_fewer_layers_than_stages_are_refused() -> None:
    with pytest.raises(Uncuttable, match="3 stages cannot be made of 2 layers: every stage needs a layer"):
        recut([nn.Sequential(*linears(2))], 3)
