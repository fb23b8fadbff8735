"""The examples do what they say, and every snippet and every refusal in the guide is as it stands there."""

import copy
import re
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset
from transformers import GPT2LMHeadModel, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

import recycle
from examples import hugging_face, sequential
from recycle.core import errors
from recycle.core.cluster import Shape
from recycle.core.events.record import Saved, Stepped, read_record
from recycle.models.text import Text
from recycle.runtime.compute.microbatches import MicroBatches
from recycle.runtime.compute.split_backward import Tape, defer_weights
from recycle.runtime.compute.tied_parameters import find_ties
from tests.warm_processes import WarmProcess

pytestmark = pytest.mark.timeout(240)
torch.set_num_threads(1)
ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "own-model.md").read_text(encoding="utf-8")
STEPS = 4


def run(script, *arguments, folder):
    """Run a script as a user does, and return what it printed."""
    process = WarmProcess([script, *arguments], folder, is_script=True)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def test_the_sequential_example_learns_and_a_dead_worker_changes_no_bit(tmp_path):
    printed = run(ROOT / "examples" / "sequential.py", "--steps", 12, "--out", "run", folder=tmp_path)
    (first, last, dead), (_, _, alive) = re.findall(r"loss (\S+) at first, (\S+) at last; weights sha256 (\w{64})", printed)
    assert float(last) < 0.7 * float(first)
    assert dead == alive
    assert printed.splitlines()[-1] == "the weights are the same, bit for bit"
    steps = [event for event in read_record(tmp_path / "run" / "record.jsonl") if isinstance(event, Stepped)]
    assert (f"{steps[0].loss:.4f}", f"{steps[-1].loss:.4f}") == (first, last)
    assert len(steps) == 12


@pytest.mark.parametrize("example", [sequential, hugging_face])
def test_examples_explain_themselves_and_refuse_in_one_sentence(example, capsys, tmp_path):
    with pytest.raises(SystemExit, match="0"):
        example.main(["--help"])
    printed = capsys.readouterr().out
    assert "--steps" in printed
    assert "--out FOLDER" in printed
    (tmp_path / "file").touch()
    for wrong, words in ((["--steps", "0"], "at least 1"), (["--out", str(tmp_path / "file" / "run")], "file")):
        with pytest.raises(SystemExit, match="2"):
            example.main(wrong)
        assert words in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_stages_one_after_the_other_compute_the_logits_of_the_whole_model(name):
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


def test_the_tie_of_gpt2_is_found_and_llama_has_none():
    gpt2 = hugging_face.make_gpt2()
    stages = hugging_face.make_stages(gpt2)
    (tie,) = find_ties(stages)
    assert tie.stages == (0, 2)
    assert tie.parameter(0, stages[0]) is tie.parameter(2, stages[2]) is gpt2.transformer.wte.weight
    assert find_ties(hugging_face.make_stages(hugging_face.make_llama())) == []


class Products:
    """A sink that keeps gradients by the parameter that they are of."""

    def __init__(self):
        self.found = {}

    def add_product(self, parameter, left, right):
        self.found[parameter] = left @ right


# Attention and MLP of each of the two blocks in a stage.
@pytest.mark.parametrize(("name", "kind", "number"), [("gpt2", Conv1D, 2 * 4), ("llama", nn.Linear, 2 * 7)])
def test_the_gradients_of_a_hugging_face_blocks_weights_wait_on_the_tape(name, kind, number):
    stage = hugging_face.make_stages(hugging_face.MODELS[name]())[1]
    whole = copy.deepcopy(stage)
    given, gradient = torch.randn(2, 2, 16, hugging_face.WIDTH, generator=torch.Generator().manual_seed(4))
    whole(given).backward(gradient)
    pairs = zip(stage.modules(), whole.modules(), strict=True)
    weights = {part.weight: other.weight for part, other in pairs if type(part) is kind}
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


def trained_plainly(model, steps):
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
    ("name", "kind", "dead"), [("gpt2", GPT2LMHeadModel, "W0_0,W1_2"), ("llama", LlamaForCausalLM, "W1_0,W1_1,W0_2")]
)
def test_live_workers_train_a_hugging_face_model_as_one_process_does(name, kind, dead, tmp_path, capsys):
    assert hugging_face.main(["--model", name, "--dead", dead, "--steps", str(STEPS), "--out", str(tmp_path)]) == 0
    assert f"{dead} dead" in capsys.readouterr().out
    events = list(read_record(tmp_path / "record.jsonl"))
    plain = hugging_face.MODELS[name]()
    expected = trained_plainly(plain, STEPS)
    assert [event.loss for event in events if isinstance(event, Stepped)] == pytest.approx(expected, rel=1e-6)
    assert expected[-1] < 0.9 * expected[0]
    assert sum(isinstance(event, Saved) for event in events) == 1

    # What was trained is a Hugging Face model again, and the one that plain training makes.
    learned = kind.from_pretrained(tmp_path / "hugging_face").train()
    ids = torch.arange(hugging_face.CONTEXT)[None]
    torch.testing.assert_close(learned(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
    if name == "gpt2":
        assert learned.lm_head.weight is learned.transformer.wte.weight
        checkpoint = tmp_path / "checkpoints" / f"step-{STEPS:08d}"
        first, last = (load_file(checkpoint / f"stage-{number}.safetensors") for number in (0, 2))
        assert torch.equal(first["0.tokens.weight"], last["8.weight"])


def test_the_snippets_of_the_guide_run_one_after_the_other(tmp_path):
    script, *rest = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
    assert len(rest) == 5
    whole = "\n".join([script, *(textwrap.indent(snippet, " " * 4) for snippet in rest)])
    (tmp_path / "mine.py").write_text(whole, encoding="utf-8")
    printed = run("mine.py", folder=tmp_path)
    steps = re.findall(r"^step (\d+) loss (\S+) norm", printed, re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(11, 21))
    # An untrained model has a loss of about 1; what was loaded does about as well as the last steps did.
    assert float(re.search(r"^trained: (\S+)$", printed, re.MULTILINE)[1]) == pytest.approx(float(steps[-1][1]), rel=0.25)


class Both(nn.Linear):
    def forward(self, x):
        made = super().forward(x)
        return made, made


class Rounded(nn.Linear):
    def forward(self, x):
        return super().forward(x).long()


def linear():
    return nn.Linear(4, 4)


# Workers must not need this module: it imports more than they have time for.
SIXTEEN = TensorDataset(torch.ones(16, 2, 4), torch.ones(16, 2, 4))

RAGGED = [(torch.ones(length, 4), torch.ones(length, 4)) for length in range(1, 17)]


RESUME = recycle.CheckpointOptions(resume=True)


def train(*stages, dataset=SIXTEEN, loss=nn.functional.mse_loss, steps=1, samples=2, out=None, **options):
    plan = recycle.solve(recycle.problem(2, 2, 2, costs=(1, 1, 1)))
    modules = stages or (linear(), linear())
    optimizer = partial(torch.optim.SGD, lr=0.1)
    options = recycle.TrainOptions(**options)
    return recycle.train(plan, modules, dataset, loss, optimizer, steps=steps, samples=samples, out=out, options=options)


def test_modules_are_after_training_what_they_were():
    stages = linear(), linear()
    before = copy.deepcopy(stages)
    trained = train(*stages, steps=3)
    assert trained.losses[-1] < trained.losses[0]
    for stage, other in zip(stages, before, strict=True):
        torch.testing.assert_close(stage.state_dict(), other.state_dict(), rtol=0, atol=0)


def train_twice(folder, **options):
    train(out=folder)
    train(out=folder, **options)


REFUSED = {
    "cutting something that is not an `nn.Sequential`": lambda folder: recycle.cut(linear(), [1]),
    "cuts that leave a stage empty": lambda folder: recycle.cut(nn.Sequential(linear(), linear()), [1, 1]),
    "another number of stages than the plan has": lambda folder: train(linear()),
    "a stage that returns a tuple": lambda folder: train(Both(4, 4), linear()),
    "a stage that returns integers": lambda folder: train(Rounded(4, 4), linear()),
    "a loss for each sample": lambda folder: train(loss=partial(nn.functional.mse_loss, reduction="none")),
    "a BatchNorm with running statistics": lambda folder: train(linear(), nn.BatchNorm1d(2)),
    "a stage that changes its input in place": lambda folder: train(linear(), nn.ReLU(inplace=True)),
    "`max_norm` of 0 or below": lambda folder: train(max_norm=-1.0),
    "a dataset that does not fill a step": lambda folder: train(samples=5),
    "samples of different shapes": lambda folder: train(dataset=RAGGED),
    "micro-batches of different shapes": lambda folder: train(dataset=RAGGED, samples=1),
    "a lambda": lambda folder: train(loss=lambda made, targets: made.mean()),
    "`resume` without `out`": lambda folder: train(checkpoint=RESUME),
    "`resume` where no checkpoint is": lambda folder: train(out=folder, checkpoint=RESUME),
    "`out` where another run is": train_twice,
    "`resume` with another seed": partial(train_twice, checkpoint=RESUME, seed=1),
}
ROWS = dict(re.findall(r"^\| ([^|]+) \| `(\w+)` \|", GUIDE.partition("## What is refused")[2], re.MULTILINE))


def test_the_table_of_the_guide_has_a_trial_for_every_row():
    assert list(ROWS) == list(REFUSED)


@pytest.mark.parametrize("what", ROWS)
def test_what_the_guide_says_is_refused_is_refused_in_one_sentence(what, tmp_path):
    kind = getattr(errors, ROWS[what])
    with pytest.raises(kind) as refusal:
        REFUSED[what](tmp_path / "run")
    assert type(refusal.value) is kind
    assert len(str(refusal.value).splitlines()) == 1
