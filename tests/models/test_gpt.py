"""The GPT: what it computes, how it is cut, and that no cut changes it."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.core.errors import UserError
from recycle.models.gpt import GptConfig, GptStage, balanced_layers, gpt_stages, next_byte_loss
from recycle.models.text import Text
from recycle.runtime.compute.tied_parameters import Tie, find_ties

torch.set_num_threads(1)

SMALL = GptConfig(vocabulary=50, context=12, width=16, num_heads=2, num_layers=4)


def ids(config, num_samples=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocabulary, (num_samples, config.context), generator=generator)


def run(stages, x):
    for stage in stages:
        x = stage(x)
    return x


def states(stages):
    """The parameters of all stages together, by the name that each has in its stage."""
    merged = {}
    for stage in stages:
        assert not merged.keys() & stage.state_dict().keys()
        merged |= stage.state_dict()
    return merged


def are_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_stages_pass_on_vectors_and_the_last_gives_logits():
    first, middle, last = gpt_stages(SMALL, 3, seed=1)
    hidden = first(ids(SMALL))
    assert hidden.shape == middle(hidden).shape == (3, 12, 16)
    assert last(hidden).shape == (3, 12, 50)
    assert hidden.dtype == last(hidden).dtype == torch.float32


def test_samples_may_be_shorter_than_the_context():
    (model,) = gpt_stages(SMALL, 1, seed=1)
    whole = model(ids(SMALL))
    torch.testing.assert_close(model(ids(SMALL)[:, :5]), whole[:, :5])


def test_samples_longer_than_the_context_are_refused():
    (model,) = gpt_stages(SMALL, 1, seed=1)
    with pytest.raises(UserError, match="13 tokens is longer than the context of 12"):
        model(torch.zeros(1, 13, dtype=torch.long))


@pytest.mark.parametrize("changed", [0, 5, 11])
def test_a_token_changes_no_logits_before_it_and_all_after(changed):
    (model,) = gpt_stages(SMALL, 1, seed=1)
    before = ids(SMALL)
    after = before.clone()
    after[:, changed] = (after[:, changed] + 1) % SMALL.vocabulary
    differs = (model(before) != model(after)).any(-1)
    assert not differs[:, :changed].any()
    assert differs[:, changed:].all()


def test_equal_tokens_at_other_places_give_other_logits():
    (model,) = gpt_stages(SMALL, 1, seed=1)
    logits = model(torch.zeros(1, 12, dtype=torch.long))[0]
    assert len({tuple(row.tolist()) for row in logits}) == 12


def test_attention_is_that_of_a_plain_soft_max():
    (stage,) = gpt_stages(SMALL, 1, seed=3)
    attention = stage.layers["0"].attention
    x = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = (x @ attention.qkv.weight.T + attention.qkv.bias).split(16, dim=-1)
    heads = []
    for part in (slice(0, 8), slice(8, 16)):
        scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(8)
        scores = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v[..., part])
    torch.testing.assert_close(attention(x), attention.out(torch.cat(heads, -1)))


def test_the_number_of_parameters_is_that_of_gpt_2():
    (model,) = gpt_stages(GptConfig(50257, 1024, 64, 4, 2, ties_embeddings=True), 1, seed=0)
    # 12 w^2 + 13 w a layer, two embeddings, and the last norm: the count of the GPT-2 paper's architecture.
    assert sum(p.numel() for p in model.parameters()) == 2 * (12 * 64**2 + 13 * 64) + (50257 + 1024) * 64 + 2 * 64


@pytest.mark.parametrize("ties", [False, True])
def test_an_untrained_model_knows_nothing(ties):
    config = GptConfig(ties_embeddings=ties)
    (model,) = gpt_stages(config, 1, seed=0)
    loss = next_byte_loss(model(ids(config, 16, seed=1)), ids(config, 16, seed=2))
    assert loss.shape == ()
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_the_loss_is_the_mean_over_all_tokens():
    logits = torch.tensor([[[0.0, math.log(3)], [0.0, 0.0]], [[0.0, 0.0], [math.log(7), 0.0]]])
    targets = torch.tensor([[1, 0], [1, 1]])
    assert next_byte_loss(logits, targets).item() == pytest.approx((math.log(4 / 3) + 2 * math.log(2) + math.log(8)) / 4)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("layers", [None, (1, 3), (2, 2), (3, 1), (1, 2, 1), (1, 1, 1, 1)])
def test_every_cut_is_the_same_model_bit_for_bit(layers, ties):
    config = replace(SMALL, ties_embeddings=ties)
    whole, parts = gpt_stages(config, 1, seed=5), gpt_stages(config, len(layers or (1, 1)), 5, layers)
    assert are_equal(states(whole), states(parts))
    assert torch.equal(run(whole, ids(config)), run(parts, ids(config)))


def test_gradients_of_a_cut_model_are_those_of_the_whole_one():
    whole, parts = gpt_stages(SMALL, 1, seed=5), gpt_stages(SMALL, 4, seed=5)
    for stages in (whole, parts):
        next_byte_loss(run(stages, ids(SMALL)), ids(SMALL, seed=1)).backward()
    one, other = ({n: p.grad for stage in stages for n, p in stage.named_parameters()} for stages in (whole, parts))
    assert are_equal(one, other)
    assert all(gradient.any() for gradient in one.values())


def test_a_stage_is_made_without_the_others():
    middle = GptStage(SMALL, range(1, 3), seed=5)
    assert are_equal(middle.state_dict(), gpt_stages(SMALL, 3, 5, (1, 2, 1))[1].state_dict())


def test_weights_depend_on_the_seed_and_on_nothing_else():
    torch.manual_seed(0)
    one = states(gpt_stages(SMALL, 2, seed=5))
    state = torch.get_rng_state()
    other, third = states(gpt_stages(SMALL, 2, seed=5)), states(gpt_stages(SMALL, 2, seed=6))
    assert torch.equal(state, torch.get_rng_state())
    assert are_equal(one, other)
    assert not any(torch.equal(one[name], third[name]) for name in one if one[name].dim() == 2)


def test_no_two_parameters_start_alike():
    matrices = [value for value in states(gpt_stages(SMALL, 1, seed=5)).values() if value.dim() == 2]
    assert len({value.flatten()[0].item() for value in matrices}) == len(matrices) == 2 + 4 * 4 + 1


def test_dropout_acts_in_training_only_and_repeats_with_the_seed():
    (model,) = gpt_stages(replace(SMALL, dropout=0.3), 1, seed=1)
    (plain,) = gpt_stages(SMALL, 1, seed=1)
    outputs = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        outputs.append(model.train()(ids(SMALL)))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert torch.equal(model.eval()(ids(SMALL)), plain(ids(SMALL)))


def test_dropout_reaches_embedding_attention_and_layers():
    (model,) = gpt_stages(replace(SMALL, dropout=0.3), 1, seed=1)
    layer, hidden = model.layers["0"], torch.linspace(0, 1, 2 * 12 * 16).reshape(2, 12, 16).sin()
    for module, x in ((model.embedding, ids(SMALL)), (layer.attention, hidden), (layer, hidden)):
        assert not torch.equal(module(x), module(x))


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_tied_embeddings_are_one_parameter_wherever_its_two_uses_are(num_stages):
    stages = gpt_stages(replace(SMALL, ties_embeddings=True), num_stages, seed=1)
    assert stages[0].embedding.tokens.weight is stages[-1].head.weight
    names = ((0, ("embedding.tokens.weight",)), (num_stages - 1, ("head.weight",)))
    assert find_ties(stages) == ([Tie(names)] if num_stages > 1 else [])


def test_untied_models_tie_nothing():
    assert find_ties(gpt_stages(SMALL, 3, seed=1)) == []


@settings(deadline=None)
@given(st.data())
def test_no_split_has_a_faster_slowest_stage(data):
    num_layers = data.draw(st.integers(1, 8))
    num_stages = data.draw(st.integers(1, min(4, num_layers)))
    width, context, vocabulary = data.draw(st.tuples(st.integers(1, 64), st.integers(1, 64), st.integers(1, 4096)))

    def slowest(split):
        # FLOPs of a token forward: qkv, out, the two of the MLP, scores and their product with v; the head.
        layer = 2 * (3 + 1 + 4 + 4) * width**2 + 2 * 2 * context * width
        return max(number * layer + (stage == num_stages - 1) * 2 * width * vocabulary for stage, number in enumerate(split))

    chosen = balanced_layers(GptConfig(vocabulary, context, width, 1, num_layers), num_stages)
    splits = [split for split in product(range(1, num_layers + 1), repeat=num_stages) if sum(split) == num_layers]
    assert chosen in splits
    assert slowest(chosen) == min(map(slowest, splits))


def test_a_costly_head_leaves_its_stage_fewer_layers():
    assert balanced_layers(GptConfig(num_layers=8), 4) == (2, 2, 2, 2)
    assert balanced_layers(GptConfig(num_layers=9, vocabulary=256), 2) == (5, 4)
    assert balanced_layers(GptConfig(num_layers=10, vocabulary=4096), 4) == (3, 3, 3, 1)


@pytest.mark.parametrize("layers", [(4,), (2, 1), (4, 0), (1, 4), (1, 2, 1), ()])
def test_splits_that_do_not_fit_are_refused(layers):
    with pytest.raises(UserError, match="does not give 4 layers to 2 stages"):
        gpt_stages(SMALL, 2, 0, layers)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(UserError, match="5 stages are more than the 4 layers of the model"):
        gpt_stages(SMALL, 5, 0)
    with pytest.raises(UserError, match="the number of stages is 0"):
        gpt_stages(SMALL, 0, 0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"vocabulary": 0}, "vocabulary is 0, but it must be a whole number of at least 1"),
        ({"num_layers": 2.0}, "num_layers is 2.0"),
        ({"context": True}, "context is True"),
        ({"num_heads": 3}, "3 heads do not share a width of 16"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": -0.1}, "dropout is -0.1"),
        ({"dropout": math.nan}, "dropout is nan"),
        ({"dropout": "0.1"}, "dropout is '0.1'"),
    ],
)
def test_configurations_that_cannot_be_are_refused(change, sentence):
    with pytest.raises(UserError, match=sentence):
        replace(SMALL, **change)


def test_training_lowers_the_loss_on_text_it_has_not_seen():
    text = Text(context=32, most_bytes=200_000)
    (model,) = gpt_stages(GptConfig(context=32, width=32, num_layers=2), 1, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def batch(start):
        inputs, targets = zip(*(text[number] for number in range(start, start + 16)), strict=True)
        return torch.stack(inputs), torch.stack(targets)

    def unseen():
        inputs, targets = batch(2000)
        with torch.no_grad():
            return next_byte_loss(model(inputs), targets).item()

    before = unseen()
    for step in range(60):
        inputs, targets = batch(16 * step)
        optimizer.zero_grad()
        next_byte_loss(model(inputs), targets).backward()
        optimizer.step()
    assert before == pytest.approx(math.log(256), abs=0.2)
    assert unseen() < 3.6
