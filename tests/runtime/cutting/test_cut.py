"""`recycle.cut`: stages compute what the model does, are balanced, keep names and ties; or a sentence says what is missing."""

import copy
import pickle

import pytest
import torch
from torch import nn

import recycle
from recycle.core.errors import Uncuttable, UserError
from recycle.core.layers import balanced_counts
from recycle.runtime.checkpoint.layer_names import find_layer_names
from recycle.runtime.compute.tied_parameters import find_ties
from recycle.runtime.cutting.module_costs import module_costs
from tests.runtime.cutting.causal_models import MODELS, NUM_LAYERS, Sentences, make_model

torch.set_num_threads(1)


def batch():
    samples = [Sentences()[number] for number in range(3)]
    return {key: torch.stack([sample[key] for sample in samples]) for key in ("input_ids", "attention_mask")}


def run(stages, given):
    torch.manual_seed(8)
    for stage in stages:
        given = stage(given)
    return given


@pytest.mark.parametrize("name", MODELS)
def test_stages_and_their_layers_compute_the_logits_of_the_model_bit_for_bit(name):
    model = make_model(name)
    stages = recycle.cut(model, stages=3)
    layers = [layer for stage in stages for layer in stage.split_into_layers()]
    assert len(layers) == NUM_LAYERS + 2
    for given in (batch(), batch()["input_ids"]):
        torch.manual_seed(8)
        expected = model(**(given if isinstance(given, dict) else {"input_ids": given})).logits
        for made in (stages, layers, copy.deepcopy(stages), pickle.loads(pickle.dumps(stages))):
            assert torch.equal(run(made, given), expected)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_models_own_under_its_own_names(name):
    model = make_model(name)
    stages = recycle.cut(model, stages=3)
    found = {key: value for stage in stages for key, value in stage.state_dict(keep_vars=True).items()}
    assert {key: id(value) for key, value in found.items()} == {
        key: id(value) for key, value in model.state_dict(keep_vars=True).items()
    }
    names = find_layer_names(stages)
    assert {there for layer in names.model for there in layer.values()} == set(found)
    ties = find_ties(stages)
    assert [tie.stages for tie in ties] == ([(0, 2)] if model.config.tie_word_embeddings else [])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_packed_sequences_do_not_see_each_other(name):
    """Neither in a cut model nor, without a cache, in the whole one: the logits of each are those of it alone."""
    model = make_model(name).eval()
    (packed,) = recycle.pack([[3, 1, 4, 1, 5], [9, 2, 6]], 8)
    at = packed["position_ids"].tolist().index(0, 1)
    row = {key: packed[key][None] for key in ("input_ids", "position_ids")}
    with torch.no_grad():
        made = run(recycle.cut(model, stages=3), row)[0]
        alone = [model(packed["input_ids"][part][None]).logits[0] for part in (slice(0, at), slice(at, 8))]
        whole, cached = (model(**row, use_cache=has_cache).logits[0] for has_cache in (False, True))
    assert torch.allclose(made, torch.cat(alone), atol=1e-6)
    assert torch.allclose(whole, made, atol=1e-6)
    assert not torch.allclose(cached, made, atol=1e-3), "then the guide need not warn of it"


def test_the_layers_of_a_model_may_be_cut_anywhere():
    model = make_model("llama")
    for cuts in ([1], [4], [2, 3], [1, 2, 3, 4]):
        stages = recycle.cut(model, cuts)
        assert torch.equal(run(stages, batch()), model(**batch()).logits)
    assert torch.equal(run(recycle.recut(stages, 2), batch()), model(**batch()).logits)


def test_the_loss_of_a_model_is_its_own():
    model = make_model("llama")
    stages = recycle.cut(model, stages=2)
    labels = batch()["input_ids"].where(batch()["attention_mask"].bool(), -100)
    loss = pickle.loads(pickle.dumps(stages[-1].make_loss()))
    assert loss(run(stages, batch()), labels).item() == model(**batch(), labels=labels).loss.item()


class Summed(nn.Module):
    """Built like a causal model, but its layers are summed and not one after the other."""

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.layers = nn.Embedding(8, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, input_ids=None, inputs_embeds=None, use_cache=False):
            x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
            return Made(last_hidden_state=sum(layer(x) for layer in self.layers))

    def __init__(self):
        super().__init__()
        self.body, self.head = self.Body(), nn.Linear(4, 8)

    def forward(self, use_cache=False, **given):
        return Made(logits=self.head(self.body(**given).last_hidden_state))


class Made:
    def __init__(self, **parts):
        self.__dict__.update(parts)


@pytest.mark.parametrize(
    ("model", "arguments", "words"),
    [
        (nn.Linear(2, 2), {"stages": 2}, "a Linear cannot be cut: it is no nn.Sequential, and no causal language model"),
        (nn.Transformer(4, 1, 1, 1, 4), {"stages": 2}, "a Transformer cannot be cut: .* nn.Embedding and one nn.ModuleList"),
        (Summed(), {"stages": 2}, "a Summed cannot be cut by its structure: .* one after another, do not compute what it does"),
        (nn.Sequential(nn.Linear(2, 2)), {"stages": 2}, "2 stages cannot be made of 1 layers"),
        (nn.Sequential(nn.Linear(2, 2)), {"stages": 0}, "0 stages cannot be made"),
        (nn.Sequential(nn.Linear(2, 2)), {"stages": True}, "True stages cannot be made"),
        (nn.Sequential(nn.Linear(2, 2)), {}, "give either cuts or stages"),
        (nn.Sequential(nn.Linear(2, 2)), {"cuts": [1], "stages": 1}, "give either cuts or stages"),
        (nn.Sequential(nn.Linear(2, 2), nn.Tanh()), {"cuts": [2]}, r"cuts at \[2\] do not leave a layer"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_what_was_looked_for(model, arguments, words):
    with pytest.raises(Uncuttable, match=words):
        recycle.cut(model, **arguments)


def test_inputs_that_a_model_does_not_take_are_refused():
    first = recycle.cut(make_model("llama"), stages=2)[0]
    with pytest.raises(UserError, match="the inputs have an entry 'overflow', which LlamaModel does not take"):
        first({**batch(), "overflow": torch.zeros(3)})
    with pytest.raises(UserError, match="the inputs are a dict of tokens, but the model needs an entry 'input_ids'"):
        first({"tokens": batch()["input_ids"]})


def test_stages_are_balanced_by_what_their_layers_cost():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)], nn.Linear(4, 16))
    assert [len(stage) for stage in recycle.cut(model, stages=2)] == [5, 2]
    pictures = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, stride=4), nn.Flatten(), nn.Linear(4 * 7 * 7, 10))
    by_weights, counted = module_costs(list(pictures)), module_costs(list(pictures), torch.zeros(2, 1, 30, 30))
    assert by_weights.index(max(by_weights)) == 3
    assert counted.index(max(counted)) == 0  # a filter is used at every place of the picture
    assert [len(stage) for stage in recycle.cut(pictures, stages=2, sample=torch.zeros(2, 1, 30, 30))] == [1, 3]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_split_has_a_cheaper_most_expensive_stage(seed):
    generator = torch.Generator().manual_seed(seed)
    costs = torch.randint(1, 20, (7,), generator=generator).tolist()
    num_stages = seed % 4 + 1

    def splits(costs, num_stages):
        if num_stages == 1:
            return [(sum(costs),)]
        return [
            (sum(costs[:end]), *rest)
            for end in range(1, len(costs) - num_stages + 2)
            for rest in splits(costs[end:], num_stages - 1)
        ]

    counts = balanced_counts(costs, num_stages)
    assert sum(counts) == 7
    assert min(counts) >= 1
    rest = iter(costs)
    loads = [sum(next(rest) for _ in range(count)) for count in counts]
    assert (max(loads), sum(load**2 for load in loads)) == min(
        (max(split), sum(load**2 for load in split)) for split in splits(costs, num_stages)
    )


def test_counting_what_layers_compute_changes_nothing_in_them() -> None:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Conv2d(1, 4, 3)), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 26 * 26, 10))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    recycle.cut(model, stages=2, sample=torch.randn(2, 1, 28, 28))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
