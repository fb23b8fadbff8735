"""The stage of a worker that does not see the run folder: what a lost file costs, and that no wait for one outlasts its epoch."""

import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from recycle.control.decide.messages import SAVE, SET_UP, StartEpoch
from recycle.core.cluster import Shape, Worker
from recycle.core.errors import FileProblem
from recycle.runtime.checkpoint.files import read_checkpoint, stage_file, step_folder
from recycle.runtime.checkpoint.folder import CheckpointFolder
from recycle.runtime.checkpoint.layer_names import find_layer_names
from recycle.runtime.checkpoint.resume import load_stage
from recycle.runtime.checkpoint.writer import StageNotSaved, StageWriter
from recycle.runtime.compute.optimizer_step import StepVerdict
from recycle.runtime.options import TrainOptions
from recycle.runtime.transport.activity import Activity, Doing
from recycle.runtime.transport.specs import GroupView, TransportBroken
from recycle.runtime.worker.local_stage import CannotLoad, LocalStage
from recycle.runtime.worker.worker_reports import WorkerWarned
from recycle.runtime.worker.worker_spec import WorkerSpec
from tests.runtime.checkpoint.saved_stages import FINGERPRINT, bits, decided_by, held, names_in, report_of, save_all, small_stage
from tests.runtime.jobs import Numbers, adamw

pytestmark = pytest.mark.timeout(60)
OWN = Worker(1, 0)
LONG_AGO_S = -1000.0


class Control:
    """What a stage asks of the control thread."""

    def __init__(self):
        self.reports, self.activity, self.is_over = [], Activity(), False
        self.report = self.reports.append


class Coordinator:
    """A folder of checkpoints, from which a stage is sent in two parts. `before_half` is called between them, and may raise."""

    def __init__(self, folder, before_half=lambda: None):
        self.folder, self.before_half = folder, before_half

    def download(self, name, read, pulse):
        pulse(1)
        self.before_half()
        pulse(0)
        with (self.folder / name).open("rb") as stream:
            return read(stream, (self.folder / name).stat().st_size)

    def upload(self, path, name, pulse):
        assert path.exists()
        self.before_half()
        pulse(1)


@pytest.fixture
def saved(tmp_path):
    """The coordinator's folder, with a checkpoint of two stages after five steps."""
    folder = tmp_path / "checkpoints"
    save_all(CheckpointFolder(folder, 2, 1, FINGERPRINT), folder, 5)
    return folder


def stage_of(control, coordinator, folder):
    spec = WorkerSpec(
        Shape(2, 2, 1),
        lambda stage: small_stage(9)[0],
        {},
        (),
        Numbers(),
        None,
        partial(adamw),
        9,
        TrainOptions(),
        folder,
        coordinator,
    )
    return LocalStage(spec, OWN, control, lambda iteration: None)


def load(stage, epoch=2):
    view = GroupView(OWN, [Worker(0, 0), OWN, Worker(0, 1)], epoch)
    stage.move_to(view, StartEpoch(epoch, str(OWN), (), "", 5, checkpoint=5, origin=epoch), torch.device("cpu"))


def fails():
    raise FileProblem("cannot download step-00000005/stage-0.safetensors from the coordinator: no byte came or went for 30 s")


def test_a_stage_is_loaded_as_it_comes_and_nothing_is_written_here(tmp_path, saved):
    stage = stage_of(Control(), Coordinator(saved), tmp_path / "own")
    load(stage)
    module, optimizer = small_stage(9)
    load_stage(read_checkpoint(saved / step_folder(5)), 0, module, optimizer)
    assert held(stage.state.stage.module, stage.state.stepper.optimizer) == held(module, optimizer)
    assert stage.progress().num_steps == 5
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_stage_of_another_shape_is_loaded_from_the_files_that_have_its_layers(tmp_path, is_sent):
    stages = [small_stage(number) for number in range(3)]
    layers = find_layer_names([module for module, _ in stages])
    checkpoints = CheckpointFolder(tmp_path / "saved", 3, 1, {"layers": layers.to_json()})
    for number, (module, optimizer) in enumerate(stages):
        decided_by(checkpoints, report_of(tmp_path / "saved", number, 5, module, optimizer))
    whole = nn.Sequential(*(layer for module, _ in stages for layer in module))
    coordinator = Coordinator(tmp_path / "saved") if is_sent else None
    spec = WorkerSpec(
        Shape(2, 1, 1),
        lambda stage: nn.Sequential(*(layer for number in range(7, 10) for layer in small_stage(number)[0])),
        {},
        (),
        Numbers(),
        None,
        partial(torch.optim.AdamW, lr=0.01),
        9,
        TrainOptions(),
        tmp_path / ("own" if is_sent else "saved"),
        coordinator,
        layers=find_layer_names([whole]),
    )
    stage = LocalStage(spec, OWN, Control(), lambda iteration: None)
    load(stage)
    found, optimizer = stage.state.stage.module, stage.state.stepper.optimizer
    assert bits(dict(found.state_dict())) == bits(dict(whole.state_dict()))
    for index, (module, trained) in enumerate(stages):
        for new, old in zip(found[2 * index].parameters(), module[0].parameters(), strict=True):
            assert bits(optimizer.state[new]) == bits(trained.state[old])


def test_a_stage_that_cannot_be_loaded_ends_the_epoch_and_not_the_worker_until_the_third_time(tmp_path, saved):
    control = Control()
    stage = stage_of(control, Coordinator(saved, fails), tmp_path / "own")
    for epoch in (2, 3):
        with pytest.raises(TransportBroken, match="cannot download step-00000005/stage-0"):
            load(stage, epoch)
        assert stage.progress() is None
    with pytest.raises(CannotLoad, match="no byte came or went for 30 s"):
        load(stage, 4)
    assert [(type(report), report.worker) for report in control.reports] == [(WorkerWarned, OWN)] * 3


def test_a_stage_that_could_be_loaded_at_last_counts_anew(tmp_path, saved):
    coordinator = Coordinator(saved, fails)
    stage = stage_of(Control(), coordinator, tmp_path / "own")
    for coordinator.before_half in (fails, fails, lambda: None, fails, fails):
        if coordinator.before_half is fails:
            with pytest.raises(TransportBroken):
                load(stage)
        else:
            load(stage)


def test_a_torn_file_in_a_folder_that_all_see_does_not_end_the_worker_either(saved):
    control = Control()
    stage = stage_of(control, None, saved)
    (saved / step_folder(5) / stage_file(0)).write_bytes(b"torn")
    with pytest.raises(TransportBroken, match="has 4 bytes, but was written with"):
        load(stage)
    assert [type(report) for report in control.reports] == [WorkerWarned]


def test_flipped_bits_in_a_folder_that_all_see_are_not_loaded(saved):
    control, path = Control(), saved / step_folder(5) / stage_file(0)
    stage = stage_of(control, None, saved)
    body = bytearray(path.read_bytes())
    body[-3] ^= 4
    path.write_bytes(body)
    with pytest.raises(TransportBroken, match="does not have the bytes that were written"):
        load(stage)
    assert stage.progress() is None
    assert [type(report) for report in control.reports] == [WorkerWarned]


def test_a_stage_on_its_way_is_not_waited_for_when_the_epoch_is_over(tmp_path, saved):
    control = Control()
    stage = stage_of(control, Coordinator(saved, lambda: setattr(control, "is_over", True)), tmp_path / "own")
    with pytest.raises(TransportBroken, match="the epoch was over"):
        load(stage)
    assert control.reports == []


def test_a_stage_on_its_way_renews_the_activity_of_its_worker(tmp_path, saved):
    control = Control()
    control.activity.now = Doing(SET_UP, "", LONG_AGO_S)
    load(stage_of(control, Coordinator(saved), tmp_path / "own"))
    assert control.activity.now.label == SET_UP
    assert control.activity.now.since_s > LONG_AGO_S


# Saving.


def saving(control, coordinator, folder):
    stage = stage_of(control, coordinator, folder)
    stage.move_to(GroupView(OWN, [OWN], 1), StartEpoch(1, str(OWN), (), "", 0), torch.device("cpu"))
    return stage


def test_a_worker_says_that_it_saves_while_it_saves_and_only_then(tmp_path, monkeypatch):
    control, seen = Control(), []
    monkeypatch.setattr(StageWriter, "save", lambda *_: seen.append(control.activity.now.label))
    stage = saving(control, Coordinator(tmp_path), tmp_path / "own")
    for iteration in (7, 8):  # the last of nine steps has a checkpoint
        control.activity.begin("optimizer")
        stage.on_applied(iteration, {}, [], StepVerdict(1.0, 1.0))
        seen.append((iteration, control.activity.now.label))
    assert seen == [(7, "optimizer"), SAVE, (8, SAVE)]


def test_a_file_that_cannot_be_sent_costs_its_report_with_the_name_of_the_worker_and_is_not_kept(tmp_path):
    control = Control()
    stage = saving(control, Coordinator(tmp_path, fails), tmp_path / "own")
    stage._save(1, is_last=True)
    stage.finish_checkpoints(StartEpoch(1, str(OWN), (), "", 0))
    (report,) = control.reports
    assert isinstance(report, StageNotSaved)
    assert report.reason.startswith("W1_0: cannot download step-00000005/stage-0.safetensors")
    assert names_in(tmp_path / "own") == []


@pytest.mark.parametrize("what", ["the epoch ends", "bytes move"])
def test_a_file_that_takes_long_to_send_is_not_waited_for_after_the_epoch_and_counts_as_progress(tmp_path, monkeypatch, what):
    monkeypatch.setattr("recycle.runtime.checkpoint.writer._PULSE_S", 0.02)
    control, is_sent = Control(), threading.Event()
    control.activity.now = Doing(SAVE, "", LONG_AGO_S)
    coordinator = Coordinator(tmp_path)

    def upload(path, name, pulse):
        while not is_sent.wait(0.01):
            pulse(what == "bytes move")
            if control.activity.now.since_s > LONG_AGO_S:
                is_sent.set()

    coordinator.upload = upload
    stage = saving(control, coordinator, tmp_path / "own")
    stage._save(1, is_last=False)
    if what == "bytes move":
        stage.finish_checkpoints(SimpleNamespace(only_saves=False, iteration=1, epoch=1))
        assert control.activity.now.since_s > LONG_AGO_S
        return
    control.is_over = True
    with pytest.raises(TransportBroken, match="the epoch was over"):
        stage.finish_checkpoints(SimpleNamespace(only_saves=False, iteration=1, epoch=1))
    stage._save(9, is_last=True)
    assert control.reports == []  # the next epoch saves it
    assert control.activity.now.since_s == LONG_AGO_S
    is_sent.set()
