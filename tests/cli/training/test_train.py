"""`recycle train`: real processes, real text; one hash whoever is dead, a record of every op, refusals in a sentence."""

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import recycle
from recycle.cli.live.live_view import LiveView
from recycle.cli.training.train import describe_run
from recycle.core.errors import LossNotFinite
from recycle.core.events.record import Event, Held, OpRan, Spell, Started, Stepped
from recycle.core.events.record_file import read_record
from recycle.core.op import Op
from recycle.core.plans.library import Library
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import needs
from recycle.core.profile import Profile
from recycle.models.gpt import next_byte_loss
from recycle.models.text import Text
from tests.cli.commands import refusal, run

pytestmark = pytest.mark.timeout(240)
SMALL = "train --pipelines 2 --stages 2 --microbatches 3 --steps 3 --layers 2 --width 32 --heads 2 --context 16"
E = TypeVar("E", bound=Event)
ALL_AT_ONCE = "--exact --dropout 0.1 --tied --max-norm 0.5"


@cache
def trained(options: str) -> dict[str, Any]:
    """What a run with these options came to; the same question is asked once."""
    return run(f"{SMALL} --json {options}").facts


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# What comes of a run.


@dataclass(frozen=True)
class Run:
    """A run that was recorded."""

    facts: dict[str, Any]
    folder: Path

    @property
    def plan(self) -> Plan:
        return Plan.load(self.folder / "plan.json")

    def events(self, kind: type[E]) -> list[E]:
        return [event for event in read_record(self.folder / "record.jsonl") if isinstance(event, kind)]


RECORDED = {
    "staggered": "--dead W1_0",
    "synchronous": "--techniques adaptive,decoupled --dead W1_0",
    "nobody dead": "",
    "three stages": "--stages 3 --layers 3 --microbatches 4 --dead W0_0,W1_2",
}


@pytest.fixture(scope="module")
def recorded_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    places = {name: tmp_path_factory.mktemp("run") for name in RECORDED}
    command = f"{SMALL} {ALL_AT_ONCE} --steps 4 --json"
    return {name: Run(run(f"{command} {RECORDED[name]} --out {place}").facts, place) for name, place in places.items()}


@pytest.fixture(params=RECORDED)
def recorded(request: pytest.FixtureRequest, recorded_runs: dict[str, Run]) -> Run:
    return recorded_runs[request.param]


def test_the_json_says_what_came_of_the_run(recorded: Run) -> None:
    facts, live = recorded.facts, {str(row.worker) for row in recorded.plan.rows}
    assert facts["steps"] == len(facts["losses"]) == 4
    assert facts["losses"][-1] < facts["losses"][0]
    assert re.fullmatch(r"[0-9a-f]{64}", facts["weights_sha256"])
    assert facts["recoveries"] == facts["warnings"] == []
    samples = recorded.plan.problem.shape.num_chains * 2
    assert facts["samples_per_s"] == pytest.approx(samples * 1e6 / facts["iteration_us"], rel=1e-3)
    assert set(facts["peak_memory_bytes"]) == set(facts["activation_bytes"]) == set(facts["planned_activation_bytes"]) == live
    assert all(peak > 50_000_000 for peak in facts["peak_memory_bytes"].values())
    assert facts["activation_bytes"] == pytest.approx(facts["planned_activation_bytes"], rel=0.1)
    assert min(facts["activation_bytes"].values()) > 10_000
    assert json.loads((recorded.folder / "summary.json").read_text()) == facts
    assert (facts["workers"], len(facts["dead"])) == (len(live), recorded.plan.problem.shape.num_workers - len(live))


def test_the_record_has_every_op_of_every_row_in_order(recorded: Run) -> None:
    ran = recorded.events(OpRan)
    assert {op.iteration for op in ran} == set(range(4))
    for row in recorded.plan.rows:
        for iteration in range(4):
            own = [op for op in ran if (op.worker, op.iteration) == (str(row.worker), iteration)]
            assert [op.op for op in own if not op.is_in_vain] == [
                *(str(slot.op) for slot in recorded.plan.slots(row)),
                "reduce",
                "optimizer",
            ]
            assert all(before.end_us <= after.start_us for before, after in pairwise(own))
            assert all(op.start_us <= op.end_us for op in own)


def test_no_op_ran_before_what_it_needs(recorded: Run) -> None:
    num_stages = recorded.plan.problem.shape.num_stages
    for iteration in range(4):
        ran = {
            op.op: op for op in recorded.events(OpRan) if op.iteration == iteration and not op.is_in_vain and op.op[0].isdigit()
        }
        for text, op in ran.items():
            for before in map(str, needs(Op.parse(text, 0), num_stages)):
                # A whole backward pass B stands for its I.
                found = ran.get(before) or ran[before.replace("I", "B")]
                assert found.end_us <= op.start_us, (before, text)


def test_what_ran_in_vain_are_forward_passes_of_iterations_whose_step_before_was_scaled(recorded: Run) -> None:
    in_vain = [op for op in recorded.events(OpRan) if op.is_in_vain]
    scaled = {step.iteration + 1 for step in recorded.events(Stepped) if step.scale != 1.0}
    assert {op.op[1] for op in in_vain} <= {"F"}
    assert {op.iteration for op in in_vain} <= scaled
    assert len({op.iteration for op in in_vain}) == recorded.facts["begun_again"]
    assert bool(in_vain) == recorded.plan.problem.techniques.staggered


def test_spells_have_no_gaps_and_their_samples_add_up(recorded: Run) -> None:
    spells = recorded.events(Spell)
    assert [spell.state for spell in spells] == ["pause", "train", "train", "train", "train"]
    assert spells[0].start_us == 0
    assert all(before.end_us == after.start_us for before, after in pairwise(spells))
    assert sum(spell.samples for spell in spells) == 4 * 2 * recorded.plan.problem.shape.num_chains
    assert all(0 < spell.busy_us <= spell.length_us for spell in spells[1:])
    assert {spell.num_live for spell in spells} == {len(recorded.plan.rows)}


def test_the_record_has_every_step_with_its_loss_at_the_end_of_its_spell(recorded: Run) -> None:
    steps = recorded.events(Stepped)
    assert [step.iteration for step in steps] == [0, 1, 2, 3]
    assert [step.loss for step in steps] == recorded.facts["losses"]
    assert [step.at_us for step in steps] == [spell.end_us for spell in recorded.events(Spell)[1:]]
    # The gradient is larger than 0.5 in all of them, and clipped to that.
    assert all(step.norm and step.scale and step.norm * step.scale == pytest.approx(0.5) for step in steps)


def test_the_record_begins_with_the_run_and_has_what_each_worker_held(recorded: Run) -> None:
    assert isinstance(next(read_record(recorded.folder / "record.jsonl")), Started)
    held = {event.worker: event for event in recorded.events(Held)}
    assert {name: event.activation_bytes for name, event in held.items()} == recorded.facts["activation_bytes"]
    assert {name: event.peak_bytes for name, event in held.items()} == recorded.facts["peak_memory_bytes"]


def test_the_report_shows_the_run(recorded: Run) -> None:
    shown = run(f"report {recorded.folder}")
    assert shown.code == 0, shown.err
    assert recorded.facts["weights_sha256"] in shown.out
    assert "iteration" in shown.out
    facts = run(f"report {recorded.folder} --json").facts
    assert facts["weights_sha256"] == recorded.facts["weights_sha256"]
    assert facts["ended"] is True


def test_the_configuration_in_the_folder_makes_the_same_run_again(tmp_path: Path) -> None:
    first = run(f"{SMALL} --dead W0_1 --dropout 0.1 --seed 7 --json --out {tmp_path / 'a'}").facts
    again = run(f"train {tmp_path / 'a' / 'config.toml'} --json --out {tmp_path / 'b'}").facts
    assert again["weights_sha256"] == first["weights_sha256"]
    assert again["losses"] == first["losses"]
    assert (tmp_path / "b" / "config.toml").read_bytes() == (tmp_path / "a" / "config.toml").read_bytes()
    plans = [Plan.load(tmp_path / name / "plan.json") for name in "ab"]
    assert plans[0].rows == plans[1].rows


def test_without_json_it_says_the_same_in_words(tmp_path: Path) -> None:
    ended = run(f"{SMALL} --dead W1_0 --out {tmp_path}")
    facts = json.loads((tmp_path / "summary.json").read_text())
    assert ended.code == 0
    assert "workers    3, dead from the start: W1_0" in ended.out
    assert f"loss       {facts['losses'][0]:.4f} at step 1, {facts['losses'][2]:.4f} at step 3" in ended.out
    assert f"weights    sha256 {facts['weights_sha256']}" in ended.out
    assert f"written    {tmp_path}" in ended.out
    assert "step 3 of 3" in ended.err
    unknown = {**facts, "losses": [None, *facts["losses"][1:]]}  # as with a leader that took over after step 1
    assert f"loss       {facts['losses'][1]:.4f} at step 2, {facts['losses'][2]:.4f} at step 3" in describe_run(unknown, None)


def test_work_that_takes_long_before_the_first_step_is_named_on_the_error_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recycle.cli.training.train._MOMENT_S", 0.0)
    ended = run(f"{SMALL} --measure --steps 1 --json")
    assert len(ended.facts["losses"]) == 1
    assert ended.err.startswith("measuring a profile of the model on this machine\nplanning (the first plan on a machine ")


# One hash.


OTHER_TRAININGS = ("--dropout 0.2", "--tied", "--max-norm 0.5", "--optimizer sgd --momentum 0.9")


@pytest.mark.parametrize("options", ["", *(pytest.param(words, marks=pytest.mark.slow) for words in OTHER_TRAININGS)])
def test_the_weights_are_the_same_bit_for_bit_with_a_dead_worker(options: str) -> None:
    whole, one_dead = trained(f"--exact {options}"), trained(f"--exact {options} --dead W1_0")
    assert one_dead["weights_sha256"] == whole["weights_sha256"]
    assert one_dead["losses"] == whole["losses"]
    assert (whole["workers"], one_dead["workers"], one_dead["dead"]) == (4, 3, ["W1_0"])


@pytest.mark.parametrize(
    "others",
    [
        "--dead W0_0,W1_1",
        "--techniques none",
        "--measure",
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in ("--dead W0_1", "--techniques adaptive --dead W1_1", "--memory 1")
        ),
    ],
)
def test_the_weights_are_the_same_bit_for_bit_whatever_the_plan(others: str) -> None:
    assert trained(f"{ALL_AT_ONCE} {others}")["weights_sha256"] == trained(ALL_AT_ONCE)["weights_sha256"]


@pytest.mark.slow
def test_the_hash_differs_for_every_difference_in_training() -> None:
    options = ["", *OTHER_TRAININGS, "--seed 2", "--rate 0.0031"]
    assert len({trained(f"--exact {option}")["weights_sha256"] for option in options}) == len(options)


def test_schedules_change_the_rate_as_they_say() -> None:
    constant, linear, cosine = (
        trained(f"--exact --optimizer sgd --rate 0.1 --steps 2 --schedule {name}") for name in ("constant", "linear", "cosine")
    )
    # In the middle of a run both have fallen to a half.
    assert linear["weights_sha256"] == cosine["weights_sha256"] != constant["weights_sha256"]
    warmed = trained("--exact --optimizer sgd --rate 0.2 --steps 2 --warmup 2 --schedule linear")
    assert warmed["losses"] == constant["losses"]  # the first step is one at half the rate
    assert warmed["weights_sha256"] != constant["weights_sha256"]


def test_losses_that_are_not_finite_are_null_and_the_run_goes_on() -> None:
    facts = trained("--optimizer sgd --rate 1e30")
    assert facts["losses"][0] > 5
    assert facts["losses"][1:] == [None, None]


def test_a_run_whose_losses_stay_infinite_ends_and_says_so() -> None:
    ended = run(f"{SMALL} --pipelines 1 --stages 1 --optimizer sgd --rate 1e30 --steps 1000")
    assert (ended.code, ended.out) == (LossNotFinite.exit_code, "") == (23, "")
    sentence = "the loss was infinite or not a number in 25 steps in a row, to step 26"
    assert ended.err.splitlines()[-1] == f"recycle train: {sentence}"


# Refusals.


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans, libraries, profiles and texts, some of another kind than a run of SMALL needs."""
    folder = tmp_path_factory.mktemp("files")
    fitting, other = recycle.problem(2, 2, 3, costs=(10, 13, 9)), recycle.problem(2, 2, 4, costs=(10, 13, 9))
    recycle.solve(fitting, "greedy").save(folder / "plan.json")
    recycle.solve(other, "greedy").save(folder / "other-shape.json")
    Library.create(folder / "other-library", other)
    library = Library.create(folder / "library", fitting)
    for fail in ("", "W1_1", "W1_0,W1_1"):
        made = recycle.solve(recycle.problem(2, 2, 3, costs=(10, 13, 9), fail=fail), "greedy")
        library.put(len(made.problem.cluster.failed), made.dumps())
    (folder / "profile.json").write_text(json.dumps(Profile.uniform(2, 5, 5, 5).to_json()))
    text = (folder / "plan.json").read_text()
    (folder / "illegal.json").write_text(re.sub(r'("W0_0": ")(\d+):(\S+)', r"\g<1>999999:\3", text))
    (folder / "torn.json").write_text(text[: len(text) // 2])
    for name, size in (("small", 100), ("tiny", 10), ("empty", 0)):
        (folder / f"{name}.txt").write_text("x" * size)
    return folder


# options of a run, its exit code, what the sentence says; {} is the folder of files
WRONG: dict[str, tuple[str, int, str]] = {
    "more stages than layers": ("--stages 3", 10, r"3 stages are more than the 2 layers"),
    "a text of too few samples": ("--data.text {}/small.txt", 11, r"needs 12 samples .* but the dataset has 6"),
    "a text of ten letters": ("--data.text {}/tiny.txt", 11, r"10 bytes"),
    "an empty text": ("--data.text {}/empty.txt", 11, r"0 bytes"),
    "a device without text": ("--text /dev/null", 11, r"0 bytes of text from /dev/null .*: give more text, or a shorter context"),
    "no text": ("--data.text {}/nowhere.txt", 2, r"there is no text at .*nowhere.txt"),
    "a plan of another shape": ("--plan {}/other-shape.json", 12, r"for 2 pipelines of 2 stages with 4 micro-batches each"),
    "a library of another shape": ("--library {}/other-library", 12, r"with 4 micro-batches each, but this run has"),
    "a plan of another profile": ("--plan {}/plan.json --profile {}/profile.json", 12, r"made from another profile"),
    "a library of another profile": ("--library {}/library --profile {}/profile.json", 12, r"made from another profile"),
    "an illegal plan": ("--plan {}/illegal.json", 12, r"the plan is not legal"),
    "half a plan": ("--plan {}/torn.json", 2, r"torn.json is not JSON"),
    "a library of nothing": ("--library {}", 2, r"cannot read .*library.json"),
    "more dead than the library has": ("--library {}/library --dead W0_0,W0_1,W1_0", 2, r"has no plan for 3 failures"),
    "a stranger for a library": ("--library {}/library --dead W9_9", 2, r"W9_9 is not a worker of this cluster"),
    "dead twice for a library": ("--library {}/library --dead W1_1,W1_1", 2, r"W1_1 is named as failed twice"),
    "a stranger": ("--dead W9_9", 2, r"W9_9 is not a worker of this cluster"),
    "a stage without anybody": ("--dead W0_1,W1_1", 2, r"stage 1 has no live worker"),
    "a dead worker nobody can stand in for": ("--dead W0_1 --techniques none", 2, r"only the technique 'adaptive'"),
    "a width that heads do not share": ("--width 30 --heads 4", 2, r"4 heads do not share a width of 30"),
    "no steps": ("--steps 0", 2, r"training.steps is 0"),
    "a rate that is no number": ("--rate nan", 2, r"training.rate is nan"),
    "a negative norm": ("--max-norm -1", 2, r"training.max_norm is -1.0"),
    "a folder that cannot be": ("--out /dev/null/run", 2, r"cannot write /dev/null/run"),
    "a folder without a name": ("--out ''", 2, r"argument --out: the name is empty: name a file or folder"),
    "tensorboard without a folder": ("--tensorboard", 2, r"name a folder with --out"),
}


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<!\S)--[a-z][\w.-]*\w", text))


@cache
def flags_of_train() -> set[str]:
    return flags_in(run("train --help").out)


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_trained_is_refused_in_one_sentence_that_advises_only_flags_that_there_are(what: str, files: Path) -> None:
    options, code, sentence = WRONG[what]
    said = refusal(f"{SMALL} {options.replace('{}', str(files))}", code)
    assert re.search(sentence, said)
    assert flags_in(re.sub(r"'recycle (?!train)[^']*'", "", said)) <= flags_of_train()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    assert "torch finds no GPU here" in refusal(f"{SMALL} --device cuda", 2)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_a_port_that_is_taken_is_refused_by_its_number(flag: str, taken_port: int) -> None:
    assert f"port {taken_port} " in refusal(f"{SMALL} {flag} {taken_port}", 13)


def test_a_folder_that_holds_a_run_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    assert run(f"{SMALL} --steps 1 --out {tmp_path}").code == 0
    before = contents(tmp_path)
    assert "holds the checkpoints of another run" in refusal(f"{SMALL} --steps 2 --seed 9 --out {tmp_path}", 2)
    assert contents(tmp_path) == before


class Fails(Text):
    """Text that a worker cannot read."""

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if parent_process() is not None:
            raise OSError("the disk is gone")
        return super().__getitem__(number)


def failing_loss(made: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if parent_process() is not None:
        raise RuntimeError("the loss is lost")
    return next_byte_loss(made, targets)


def test_a_worker_that_cannot_go_on_is_named_with_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("recycle.models.gpt.next_byte_loss", failing_loss)
    ended = run(f"{SMALL} --out {tmp_path}")
    assert (ended.code, ended.out) == (20, "")
    assert re.search(r"^recycle train: W[01]_[01] cannot go on:$", ended.err, re.MULTILINE)
    assert ended.err.rstrip().endswith("RuntimeError: the loss is lost")


def test_a_sample_that_cannot_be_read_is_named_in_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("recycle.models.text.Text", Fails)
    ended = run(f"{SMALL} --out {tmp_path}")
    assert (ended.code, ended.out) == (27, "")
    last = ended.err.rstrip().splitlines()[-1]
    assert re.fullmatch(r"recycle train: sample \d+ of the dataset raised OSError in .*: the disk is gone; mend .*", last)


def test_what_shows_a_run_cannot_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(view: LiveView, event: Event) -> None:
        raise ZeroDivisionError("from outside")

    monkeypatch.setattr(LiveView, "observe", broken)
    made = trained("--steps 2")
    assert len(made["losses"]) == 2
    assert made["warnings"].count("the live view raised ZeroDivisionError: from outside; training goes on") == 1


def test_a_model_of_many_small_tensors_trains() -> None:
    assert len(trained("--layers 48 --width 16 --heads 1 --steps 1")["losses"]) == 1
