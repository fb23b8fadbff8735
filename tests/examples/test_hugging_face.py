"""The example of Hugging Face models: its stages compute what the models compute, and train as they would.

Only the test process that runs these tests loads transformers, which takes five seconds.
"""

import copy
import importlib

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from recycle.core.cluster import Shape
from recycle.core.events.record import Saved, Stepped
from recycle.core.events.record_file import read_record
from recycle.models.text import Text
from recycle.runtime.compute.microbatches import MicroBatches
from recycle.runtime.compute.split_backward import Tape, defer_weights
from recycle.runtime.compute.tied_parameters import find_ties
from tests.examples.test_examples import ROOT, explains_itself, run

pytestmark = pytest.mark.timeout(240)
STEPS = 3


def load_transformers():
    return importlib.import_module("examples.hugging_face")


@pytest.fixture(scope="module")
def hugging_face():
    return load_transformers()


def test_it_explains_itself_and_refuses_in_one_sentence(hugging_face, capsys, tmp_path):
    explains_itself(hugging_face, capsys, tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_stages_one_after_the_other_compute_the_logits_of_the_whole_model(hugging_face, name):
    model = hugging_face.MODELS[name]()
    stages = hugging_face.make_stages(model)
    assert len(stages) == 3
    ids = torch.randint(256, (2, hugging_face.CONTEXT), generator=torch.Generator().manual_seed(3))
    made = ids
    for stage in stages:
        made = stage(made)
    assert torch.equal(made, model(ids).logits)
    # Every parameter is in a stage, and is the model's own.
    held = {id(parameter) for stage in stages for parameter in stage.parameters()}
    assert held == {id(parameter) for parameter in model.parameters()}


def test_the_tie_of_gpt2_is_found_and_llama_has_none(hugging_face):
    gpt2 = hugging_face.make_gpt2()
    stages = hugging_face.make_stages(gpt2)
    (tie,) = find_ties(stages)
    assert tie.stages == (0, 2)
    (first,), (last,) = tie.parameters(0, stages[0]), tie.parameters(2, stages[2])
    assert first is last is gpt2.transformer.wte.weight
    assert find_ties(hugging_face.make_stages(hugging_face.make_llama())) == []


class Products:
    """A sink that keeps gradients by the parameter that they are of."""

    def __init__(self):
        self.found = {}

    def add_product(self, parameter, left, right):
        self.found[parameter] = left @ right


# Attention and MLP of each of the two blocks in a stage.
@pytest.mark.parametrize(("name", "kind", "number"), [("gpt2", "Conv1D", 2 * 4), ("llama", "Linear", 2 * 7)])
def test_the_gradients_of_a_hugging_face_blocks_weights_wait_on_the_tape(hugging_face, name, kind, number):
    stage = hugging_face.make_stages(hugging_face.MODELS[name]())[1]
    whole = copy.deepcopy(stage)
    given, gradient = torch.randn(2, 2, 16, hugging_face.WIDTH, generator=torch.Generator().manual_seed(4))
    whole(given).backward(gradient)
    pairs = zip(stage.modules(), whole.modules(), strict=True)
    weights = {part.weight: other.weight for part, other in pairs if type(part).__name__ == kind}
    assert len(weights) == number

    tape, deferral = Tape(), defer_weights(stage)
    made = stage(given.clone().requires_grad_(True))
    with deferral.use(tape):
        made.backward(gradient)
    assert all(weight.grad is None for weight in weights)
    assert sum(storage.nbytes() for storage in tape.storages()) > 0
    products = Products()
    tape.play(products)
    assert set(products.found) == set(weights)
    for weight, other in weights.items():
        torch.testing.assert_close(products.found[weight], other.grad)


def trained_plainly(hugging_face, model, steps):
    """Train the model as a whole in this process on the same samples, and return its losses."""
    batches = MicroBatches(Text(hugging_face.CONTEXT), Shape(2, 3, 4), 4, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        pairs = [batches.get(step, pipeline, index) for pipeline in range(2) for index in range(4)]
        ids, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        loss = nn.functional.cross_entropy(model(ids).logits.transpose(1, 2), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("name", "dead"), [("gpt2", "W0_0,W1_2"), pytest.param("llama", "W1_0,W1_1,W0_2", marks=pytest.mark.slow)]
)
def test_live_workers_train_a_hugging_face_model_as_one_process_does(hugging_face, name, dead, tmp_path):
    script, words = ROOT / "examples" / "hugging_face.py", ("--model", name, "--dead", dead, "--steps", STEPS, "--out", tmp_path)
    assert f"{dead} dead" in run(script, *words, folder=tmp_path, prepare=load_transformers)
    events = list(read_record(tmp_path / "record.jsonl"))
    plain = hugging_face.MODELS[name]()
    expected = trained_plainly(hugging_face, plain, STEPS)
    assert [event.loss for event in events if isinstance(event, Stepped)] == pytest.approx(expected, rel=1e-6)
    assert expected[-1] < 0.9 * expected[0]
    assert sum(isinstance(event, Saved) for event in events) == 1

    # What was trained is a Hugging Face model again, and the one that plain training makes.
    learned = type(plain).from_pretrained(tmp_path / "hugging_face").train()
    ids = torch.arange(hugging_face.CONTEXT)[None]
    torch.testing.assert_close(learned(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
    if name == "gpt2":
        assert learned.lm_head.weight is learned.transformer.wte.weight
        checkpoint = tmp_path / "checkpoints" / f"step-{STEPS:08d}"
        first, last = (load_file(checkpoint / f"stage-{number}.safetensors") for number in (0, 2))
        assert torch.equal(first["transformer.wte.weight"], last["lm_head.weight"])
