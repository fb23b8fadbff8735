"""Models in the formats of others: `from_pretrained` gives the trained model bit for bit, and so does torch's own checkpoint."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

import recycle
from recycle.cli.main import main
from recycle.core.errors import FileProblem, ForeignRun, UserError
from recycle.runtime.checkpoint.model_formats import read_model
from tests.runtime.cutting.causal_models import Sentences, make_model
from tests.runtime.cutting.test_causal_training import FIVE, SAMPLES, SEED, SHAPE, adamw
from tests.runtime.jobs import greedy_plan

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(300)


class FewSentences(Sentences):
    def __len__(self):
        return 8

    def __getitem__(self, number):
        return super().__getitem__(1000 + number)


def train(out, model, steps=2):
    evaluation = recycle.EvaluationOptions(FewSentences())
    options = recycle.TrainOptions(SEED, is_exact=True, evaluation=evaluation, quiet=True)
    stages = recycle.cut(model, stages=2)
    plan = greedy_plan(SHAPE, "W1_0")
    return recycle.train(plan, stages, Sentences(), None, adamw, steps=steps, samples=SAMPLES, out=out, options=options)


@pytest.fixture(scope="module")
def gpt2_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpt2") / "run"
    return out, train(out, make_model("gpt2"))


def loaded(name, run):
    """The model itself with the weights of a run."""
    model = make_model(name).eval()
    recycle.load(recycle.cut(model, stages=3), run)  # stages share the parameters of the model
    return model


def batches(data):
    for first in range(0, len(data), SAMPLES):
        samples = [data[number] for number in range(first, first + SAMPLES)]
        yield {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in FIVE[1:])])
def test_from_pretrained_loads_the_trained_model_bit_for_bit(name, gpt2_run, tmp_path, capsys):
    run, trained = gpt2_run if name == "gpt2" else (tmp_path / "run", train(tmp_path / "run", make_model(name)))
    main(["export", str(run), "--to", "hf", str(tmp_path / "exported")])
    assert "after 2 steps" in capsys.readouterr().out
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    assert type(exported) is type(make_model(name))
    whole, first = loaded(name, run), make_model(name).eval()
    losses = []
    with torch.no_grad():
        for batch in batches(FewSentences()):
            made = exported(**batch)
            assert torch.equal(made.logits, whole(**batch).logits)
            assert not torch.equal(made.logits, first(**batch).logits)
            losses.append(made.loss.item())
    # The evaluation of the run is the number of plain code with the exported model.
    assert trained.evaluations[-1].loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)


@pytest.mark.slow
def test_training_starts_from_an_exported_folder(gpt2_run, tmp_path):
    run, trained = gpt2_run
    recycle.export_model(run, tmp_path / "exported", to="hf")
    again = train(tmp_path / "again", AutoModelForCausalLM.from_pretrained(tmp_path / "exported"), steps=1)
    assert again.losses[0] != trained.losses[0]
    whole = loaded("gpt2", run).train()
    first = [whole(**batch).loss.item() for batch in first_batches()]
    assert again.losses[0] == pytest.approx(sum(first) / len(first), rel=1e-5)


def first_batches():
    """The micro-batches of the first step."""
    from recycle.core.cluster import Shape
    from recycle.runtime.compute.microbatches import MicroBatches

    source = MicroBatches(Sentences(), Shape(*SHAPE), SAMPLES, SEED)
    for pipeline in range(SHAPE[0]):
        for index in range(SHAPE[2]):
            inputs, labels = source.get(0, pipeline, index)
            yield {**inputs, "labels": labels}


def states_are_equal(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("to", ["hf", "dcp", "safetensors"])
def test_every_format_is_loaded_into_stages_again(to, gpt2_run, tmp_path):
    run, _ = gpt2_run
    exported = recycle.export_model(run, tmp_path / "exported", to=to)
    assert (exported.num_steps, exported.path) == (2, tmp_path / "exported")
    model = make_model("gpt2")
    recycle.load_model(recycle.cut(model, stages=2), exported.path)
    assert states_are_equal(model, loaded("gpt2", run))


def test_torch_reads_its_own_format(gpt2_run, tmp_path):
    run, _ = gpt2_run
    recycle.export_model(run, tmp_path / "exported", to="dcp")
    model = make_model("gpt2")
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "exported", no_dist=True)
    model.load_state_dict(state["model"])
    assert states_are_equal(model, loaded("gpt2", run))


def test_what_torch_has_saved_is_loaded_into_stages(tmp_path):
    torch.manual_seed(9)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "saved", no_dist=True)
    other = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    recycle.load_model(recycle.cut(other, [2]), tmp_path / "saved")
    assert states_are_equal(other, model)


@pytest.mark.parametrize("most_bytes", ["1GB", "4KB"])
def test_what_hugging_face_has_saved_is_loaded_into_stages(most_bytes, tmp_path):
    torch.manual_seed(9)
    model = type(make_model("gpt2"))(make_model("gpt2").config)
    model.save_pretrained(tmp_path, max_shard_size=most_bytes)  # without the head, which is tied
    other = make_model("gpt2")
    recycle.load_model(recycle.cut(other, stages=3), tmp_path)
    assert states_are_equal(other, model)
    assert other.lm_head.weight is other.transformer.wte.weight


def test_a_model_without_a_configuration_is_no_folder_of_hugging_face(gpt2_run, tmp_path):
    run, _ = gpt2_run
    copy = tmp_path / "run"
    copy.mkdir()
    (copy / "checkpoints").symlink_to(run / "checkpoints")
    with pytest.raises(FileProblem, match=r"the run trained no model of Hugging Face that recycle\.cut has cut"):
        recycle.export_model(copy, tmp_path / "exported", to="hf")


def test_what_cannot_be_exported_is_one_sentence(gpt2_run, tmp_path):
    run, _ = gpt2_run
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(FileProblem, match="it is there already, and no empty folder"):
        recycle.export_model(run, tmp_path / "full", to="hf")
    with pytest.raises(UserError, match="'onnx' is no format of a model: choose from safetensors, hf, dcp"):
        recycle.export_model(run, tmp_path / "other", to="onnx")


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(FileProblem, match="holds no model"):
        read_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(FileProblem, match="which is not in its folder"):
        read_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(FileProblem, match="is no index of a model"):
        read_model(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"something else")
    with pytest.raises(FileProblem, match=r"cannot be read by torch\.distributed\.checkpoint"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8)), r"it has no 1\.bias"),
        (lambda: torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(8, 2, bias=False)), r"it has 0\.bias"),
        (lambda: torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Linear(9, 2, bias=False)), r"stage 0 cannot be loaded"),
    ],
)
def test_another_model_is_refused(make, says, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2, bias=False))
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    with pytest.raises(ForeignRun, match=says):
        recycle.load_model(recycle.cut(make(), [1]), tmp_path / "saved")
