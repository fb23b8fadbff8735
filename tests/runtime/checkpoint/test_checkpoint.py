"""A run that is resumed comes to the same as one that never stopped, bit for bit; what is torn or foreign is not loaded."""

import json
import re
from itertools import product

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, RMSprop

from recycle.core.errors import FileProblem, ForeignRun, NoCheckpoint
from recycle.runtime.checkpoint.folder import CheckpointFolder
from recycle.runtime.checkpoint.resume import latest, load_stage, put_stage
from recycle.runtime.checkpoint.tensor_file import load_tensors
from tests.runtime.checkpoint.saved_stages import FINGERPRINT, decided_by, held, report_of, save_all, small_stage

pytestmark = pytest.mark.timeout(120)
WIDTH = 6


class Stage(nn.Module):
    """Weights, buffers that training changes, tied weights, and one that nobody steps."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.again = self.last
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x):
        return self.again(self.last(self.norm(self.first(x)).tanh())) + self.frozen


class Wide(torch.optim.Optimizer):
    """State that torch itself would not bring back: wider than its parameter, words, numbers of all kinds, nested."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": torch.tensor(0.1, dtype=torch.float64), "limits": (-float("inf"), [1, None])})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.to(torch.float32).clone()
                    state["step"] = torch.tensor(0, dtype=torch.int64)
                    state["word"] = "warm"
                    total = torch.zeros((), dtype=torch.float64, device=parameter.device)
                    state["pair"] = (0.1, True, {"sums": [total, torch.tensor(True)], 0: None})
                    state["0"], state[0] = torch.ones(1), torch.zeros(1)
                state["step"] += 1
                state["pair"][2]["sums"][0].add_(parameter.grad.to(torch.float64).sum() / 3)
                state["master"] -= float(group["lr"]) * parameter.grad.to(torch.float32)
                parameter.copy_(state["master"])


def in_groups(module):
    weights = [value for name, value in module.named_parameters() if name.endswith("weight")]
    biases = {"params": [value for name, value in module.named_parameters() if name.endswith("bias")]}
    return AdamW([biases | {"weight_decay": 0.0, "lr": 0.1 + 0.2}, {"params": weights, "betas": (0.8, 1 - 1e-3)}], lr=1 / 3)


def of_all(make, **words):
    return lambda module: make([value for value in module.parameters() if value.requires_grad], **words)


OPTIMIZERS = {
    "AdamW": of_all(AdamW, lr=0.01, weight_decay=0.1),
    "SGD": of_all(SGD, lr=0.05),
    "SGD with momentum": of_all(SGD, lr=0.05, momentum=0.9, nesterov=True),
    "several groups": in_groups,
    "Adam amsgrad": of_all(Adam, lr=0.01, amsgrad=True),
    "Adam with a tensor for a learning rate": of_all(Adam, lr=torch.tensor(0.01)),
    "fused Adam": of_all(Adam, lr=0.01, fused=True),
    "NAdam": of_all(NAdam, lr=0.01),
    "RMSprop": of_all(RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": of_all(Adagrad, lr=0.01),
    "state of many kinds": of_all(Wide),
}


def train(module, optimizer, steps, **where):
    for step in steps:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(**where)
        optimizer.zero_grad()
        (module(x) - x.roll(1, -1)).square().mean().backward()
        optimizer.step()


def saved(folder, stages, num_steps=5):
    """The checkpoint of `stages`, found on disk."""
    checkpoints = CheckpointFolder(folder, len(stages), 2, FINGERPRINT)
    for number, (module, optimizer) in enumerate(stages):
        decided = decided_by(checkpoints, report_of(folder, number, num_steps, module, optimizer))
    assert decided.num_steps == num_steps
    found, sentences = latest(folder, FINGERPRINT)
    assert sentences == []
    return found


def resume_and_compare(folder, make, **where):
    torch.manual_seed(1)
    module = Stage().to(**where)
    optimizer = make(module)
    train(module, optimizer, range(5), **where)
    checkpoint = saved(folder, [(module, optimizer)])

    torch.manual_seed(2)
    fresh = Stage().to(**where)
    fresh_optimizer = make(fresh)
    train(fresh, fresh_optimizer, range(90, 92), **where)  # it has state of its own, which must go
    assert held(fresh, fresh_optimizer) != held(module, optimizer)
    load_stage(checkpoint, 0, fresh, fresh_optimizer)
    assert held(fresh, fresh_optimizer) == held(module, optimizer)

    train(module, optimizer, range(5, 9), **where)
    train(fresh, fresh_optimizer, range(5, 9), **where)
    assert held(fresh, fresh_optimizer) == held(module, optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_resumed_run_is_one_that_never_stopped(tmp_path, kind, dtype):
    resume_and_compare(tmp_path, OPTIMIZERS[kind], dtype=dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_a_resumed_run_on_a_gpu_is_one_that_never_stopped(tmp_path):
    optimizers = OPTIMIZERS | {"capturable Adam": of_all(Adam, lr=torch.tensor(0.01, device="cuda"), capturable=True)}
    for kind, dtype in product(optimizers, (torch.float32, torch.bfloat16)):
        resume_and_compare(tmp_path / kind / str(dtype), optimizers[kind], dtype=dtype, device="cuda")


def test_loading_happens_in_place(tmp_path):
    checkpoint = saved(tmp_path, [small_stage(1)])
    module, optimizer = small_stage(2)
    weight = module[0].weight
    load_stage(checkpoint, 0, module, optimizer)
    assert module[0].weight is weight
    assert optimizer.param_groups[0]["params"][0] is weight
    assert torch.equal(weight, small_stage(1)[0][0].weight)


def test_each_stage_gets_its_own(tmp_path):
    stages = [small_stage(seed) for seed in (1, 2, 3)]
    checkpoint = saved(tmp_path, stages)
    for number, stage in enumerate(stages):
        fresh = small_stage(9)
        load_stage(checkpoint, number, *fresh)
        assert held(*fresh) == held(*stage)


def test_a_stage_before_its_first_step_is_saved_without_state(tmp_path):
    module = nn.Linear(2, 2)
    optimizer = AdamW(module.parameters(), lr=0.5)
    checkpoint = saved(tmp_path, [(module, optimizer)], num_steps=0)
    fresh = nn.Linear(2, 2)
    fresh_optimizer = AdamW(fresh.parameters())
    fresh(torch.ones(1, 2)).sum().backward()
    fresh_optimizer.step()
    load_stage(checkpoint, 0, fresh, fresh_optimizer)
    assert held(fresh, fresh_optimizer) == held(module, optimizer)
    assert not fresh_optimizer.state


class NoParameters(torch.optim.Optimizer):
    """An optimizer that has nothing to do, as a stage of activations alone has it."""

    def __init__(self):
        super().__init__([{"params": [], "lr": 0.25}], {})


def test_a_stage_without_parameters_is_saved_and_loaded(tmp_path):
    checkpoint = saved(tmp_path, [(nn.Tanh(), NoParameters())])
    optimizer = NoParameters()
    optimizer.param_groups[0]["lr"] = 0.0
    load_stage(checkpoint, 0, nn.Tanh(), optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_state_lies_in_memory_as_its_parameter_does(tmp_path):
    def make():
        module = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        optimizer = AdamW(module.parameters())
        module(torch.ones(1, 3, 4, 4)).sum().backward()
        optimizer.step()
        return module, optimizer

    module, optimizer = make()
    checkpoint = saved(tmp_path, [(module, optimizer)])
    fresh, fresh_optimizer = make()
    load_stage(checkpoint, 0, fresh, fresh_optimizer)
    state, fresh_state = optimizer.state[module.weight], fresh_optimizer.state[fresh.weight]
    assert fresh_state["exp_avg"].stride() == state["exp_avg"].stride() == module.weight.stride()
    assert held(fresh, fresh_optimizer) == held(module, optimizer)


def test_a_schedule_of_torch_goes_on_where_it_was(tmp_path):
    def make():
        module, optimizer = small_stage(1)
        return module, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

    module, optimizer, schedule = make()
    for _ in range(3):
        optimizer.step()
        schedule.step()
    checkpoint = saved(tmp_path, [(module, optimizer)])
    fresh, fresh_optimizer, _ = make()
    load_stage(checkpoint, 0, fresh, fresh_optimizer)
    assert fresh_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] != 0.01
    assert fresh_optimizer.param_groups[0]["initial_lr"] == 0.01


def test_the_weights_can_be_read_with_the_public_library_under_their_own_names(tmp_path):
    module, optimizer = small_stage(1)
    checkpoint = saved(tmp_path, [(module, optimizer)])
    tensors = load_file(checkpoint.folder / "stage-0.safetensors")
    assert torch.equal(tensors["0.weight"], module[0].weight)
    assert torch.equal(tensors["optimizer/0.weight/exp_avg"], optimizer.state[module[0].weight]["exp_avg"])
    assert set(module.state_dict()) == {name for name in tensors if not name.startswith("optimizer/")}


def test_the_manifest_says_what_the_checkpoint_is(tmp_path):
    saved(tmp_path, [small_stage(1), small_stage(2)], num_steps=20)
    manifest = json.loads((tmp_path / "step-00000020" / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"], manifest["num_steps"]) == ("recycle-checkpoint", 1, 20)
    assert manifest["fingerprint"] == FINGERPRINT
    assert [file["name"] for file in manifest["files"]] == ["stage-0.safetensors", "stage-1.safetensors"]
    for file in manifest["files"]:
        assert file["size_bytes"] == (tmp_path / "step-00000020" / file["name"]).stat().st_size


# Another job.


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "the checkpoint has no 1.weight, which this job trains"),
        (lambda: nn.Sequential(nn.Linear(4, 4, bias=False)), "the checkpoint has 0.bias, which this job does not train"),
        (
            lambda: nn.Sequential(nn.Linear(5, 4)),
            r"0.weight is torch.float32 of shape \(4, 4\) in the checkpoint, but .*\(4, 5\)",
        ),
        (lambda: nn.Sequential(nn.Linear(4, 4)).double(), "0.weight is torch.float32 .* but torch.float64 .* in this job"),
    ],
)
def test_a_stage_of_another_module_is_refused_and_nothing_is_loaded(tmp_path, make, sentence):
    checkpoint = saved(tmp_path, [small_stage(1)])
    module = make()
    optimizer = AdamW(module.parameters())
    before = held(module, optimizer)
    with pytest.raises(ForeignRun, match=f"stage 0 cannot be loaded from .*step-00000005: .*{sentence}"):
        load_stage(checkpoint, 0, module, optimizer)
    assert held(module, optimizer) == before


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda weight, bias: SGD([weight, bias]), "made with AdamW, but this job steps with SGD"),
        (lambda weight, bias: AdamW([{"params": [weight]}, {"params": [bias]}]), "has 1 parameter groups, but .* has 2"),
        (lambda weight, bias: AdamW([weight]), "group 0 of the checkpoint has 0.bias where this job's optimizer has nothing"),
        (
            lambda weight, bias: AdamW([bias, weight]),
            "group 0 of the checkpoint has 0.weight where this job's optimizer has 0.bias",
        ),
    ],
)
def test_a_stage_with_another_optimizer_is_refused_and_nothing_is_loaded(tmp_path, make, sentence):
    checkpoint = saved(tmp_path, [small_stage(1)])
    module, _ = small_stage(2)
    optimizer = make(*module.parameters())
    before = held(module, optimizer)
    with pytest.raises(ForeignRun, match=sentence):
        load_stage(checkpoint, 0, module, optimizer)
    assert held(module, optimizer) == before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": 4}, "its seed is 3, but this job's is 4"),
        ({"seed": True}, "its seed is 3, but this job's is true"),
        ({"shape": {"pipelines": 2, "stages": 3, "microbatches": 8}}, "its shape.stages is 2, but this job's is 3;"),
        ({"names": ["0.weight"]}, r'its names is \["0.weight", "0.bias"\], but this job\'s is \["0.weight"\]'),
        ({"new": 1}, "its new is not there, but this job's is 1"),
        ({"model": [{"w": [2]}, {"w": [3]}]}, r"its model.1.w is \[2\], but this job's is \[3\]"),
        ({"model": [{"w": [2]}]}, r"its model.1 is {.*}, but this job's is not there"),
        ({"names": [0] * 100}, r"its names .*, but this job's is \[0, 0, .*\.\.\.; resume with the same job"),
    ],
)
def test_a_run_of_another_job_is_refused_by_the_first_key_that_differs(tmp_path, change, sentence):
    saved(tmp_path, [small_stage(1)])
    with pytest.raises(ForeignRun, match=f"step-00000005 was made by another job: {sentence}"):
        latest(tmp_path, FINGERPRINT | change)


def test_tuples_and_lists_are_one_in_a_fingerprint(tmp_path):
    saved(tmp_path, [small_stage(1)])
    assert latest(tmp_path, FINGERPRINT | {"names": ("0.weight", "0.bias")})[0].num_steps == 5


# What is torn.


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path, at=-40):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def edit(path, **change):
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


TEARS = {
    "a file is cut": (
        lambda folder: cut(folder / "stage-1.safetensors"),
        "stage-1.safetensors has .* bytes, but was written with",
    ),
    "a bit is flipped": (lambda folder: flip(folder / "stage-0.safetensors"), "stage-0.* does not have the bytes .* SHA-256"),
    "a file is gone": (lambda folder: (folder / "stage-1.safetensors").unlink(), "cannot read .*stage-1.*: No such file"),
    "the manifest is gone": (lambda folder: (folder / "manifest.json").unlink(), "cannot read .*manifest.json: No such file"),
    "the manifest is cut": (lambda folder: cut(folder / "manifest.json") or cut(folder / "manifest.json"), "is not JSON"),
    "the manifest is of a later release": (lambda folder: edit(folder / "manifest.json", version=2), "reads version 1"),
    "the manifest is of other steps": (lambda folder: edit(folder / "manifest.json", num_steps=3), "another checkpoint, after 3"),
    "the manifest has no files": (lambda folder: edit(folder / "manifest.json", files=[]), "does not name one file a stage"),
    "the manifest has odd files": (
        lambda folder: edit(folder / "manifest.json", files=[1]),
        "does not say name, size and digest",
    ),
    "the manifest has another text": (
        lambda folder: edit(folder / "manifest.json", fingerprint={**FINGERPRINT, "layers": None}),
        "does not have the text that was written: its SHA-256 is",
    ),
    "the manifest has nothing": (lambda folder: edit(folder / "manifest.json", files=None), "does not say what belongs to"),
}


@pytest.mark.parametrize("tear", TEARS)
def test_a_torn_checkpoint_is_reported_and_the_one_before_is_used(tmp_path, tear):
    checkpoints = CheckpointFolder(tmp_path, 2, 3, FINGERPRINT)
    for num_steps in (10, 20, 30):
        save_all(checkpoints, tmp_path, num_steps)
    do, sentence = TEARS[tear]
    do(tmp_path / "step-00000030")
    do(tmp_path / "step-00000020")
    found, (first, second) = latest(tmp_path, FINGERPRINT)
    assert found.num_steps == 10
    # A dot does not match the end of a line: it is one sentence on one line.
    assert re.fullmatch(f"checkpoint step-00000030 is torn: .*{sentence}.*; step-00000010 before it is used", first)
    assert re.fullmatch(f"checkpoint step-00000020 is torn: .*{sentence}.*; step-00000010 before it is used", second)
    module, optimizer = small_stage(5)
    load_stage(found, 1, module, optimizer)
    assert held(module, optimizer) == held(*small_stage(1001))


def test_older_torn_checkpoints_are_nobodys_business(tmp_path):
    checkpoints = CheckpointFolder(tmp_path, 2, 3, FINGERPRINT)
    for num_steps in (10, 20):
        save_all(checkpoints, tmp_path, num_steps)
    cut(tmp_path / "step-00000010" / "stage-0.safetensors")
    found, sentences = latest(tmp_path, FINGERPRINT)
    assert (found.num_steps, sentences) == (20, [])


def test_one_that_was_not_finished_is_reported(tmp_path):
    checkpoints = CheckpointFolder(tmp_path, 2, 3, FINGERPRINT)
    save_all(checkpoints, tmp_path, 10)
    decided_by(checkpoints, report_of(tmp_path, 0, 20, *small_stage()))
    found, sentences = latest(tmp_path, FINGERPRINT)
    assert found.num_steps == 10
    assert sentences == ["checkpoint step-00000020.partial was not finished; step-00000010 before it is used"]


def test_without_a_whole_checkpoint_there_is_nothing_to_resume(tmp_path):
    with pytest.raises(NoCheckpoint, match=r"no whole checkpoint in .*nowhere: start the run anew, without resuming"):
        latest(tmp_path / "nowhere", FINGERPRINT)
    saved(tmp_path, [small_stage(1)])
    cut(tmp_path / "step-00000005" / "stage-0.safetensors")
    with pytest.raises(NoCheckpoint, match=r"without resuming; checkpoint step-00000005 is torn: .*stage-0.safetensors has"):
        latest(tmp_path, FINGERPRINT)


def test_the_order_is_that_of_numbers_also_where_they_need_more_digits(tmp_path):
    checkpoints = CheckpointFolder(tmp_path, 1, 3, FINGERPRINT)
    for num_steps in (100_000_000, 99_999_999):
        save_all(checkpoints, tmp_path, num_steps, num_stages=1)
    assert latest(tmp_path, FINGERPRINT)[0].num_steps == 100_000_000


def test_a_file_of_another_stage_is_not_loaded(tmp_path):
    checkpoint = saved(tmp_path, [small_stage(1), small_stage(2)])
    path = checkpoint.folder / "stage-1.safetensors"
    (checkpoint.folder / "stage-0.safetensors").replace(path)
    with pytest.raises(FileProblem, match=r"stage-1\.safetensors does not have the bytes that were written"):
        load_stage(checkpoint, 1, *small_stage(3))
    with pytest.raises(FileProblem, match=r"stage-1\.safetensors does not hold stage 1 after 5 steps"):
        put_stage(checkpoint, lambda number: load_tensors(path), 1, *small_stage(3))
