"""W&B (offline), MLflow (a local store), CSV and TensorBoard: all get every step, evaluation and recovery of a run with failures.

The worker W1_1 is killed and comes back, the coordinator is killed, and the run is resumed from a checkpoint that is older than
what was logged.
"""

import csv
import json
import struct
from collections import Counter

import pytest
import torch

import recycle
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.core.events.record import Evaluated, Recovered, Stepped
from recycle.core.events.record_file import RECORD, read_record
from recycle.planner.live_planner import Planner
from recycle.runtime.options import CheckpointOptions, EvaluationOptions, FailureOptions, TrainOptions
from tests.runtime.jobs import BATCH, LEASE_S, Numbers, adamw, loss
from tests.runtime.recovery_runs import ALL, problem, unhurried_stages

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(240)
SHAPE, STEPS, EVALUATED = (2, 2, 3), 16, "evaluation/loss"


class Points:
    """The evaluation data."""

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return tuple(each[0] for each in Numbers().get(100, 0, number))


class Stop(recycle.Callback):
    """Ends the run after a step, as a user's own callback may."""

    is_required = True

    def __init__(self, after):
        self.after = after

    def on_step(self, step):
        if step.step == self.after:
            raise KeyError(self.after)


def train(out, callbacks, *lines, resume=False):
    wanted = problem(SHAPE, ALL)
    script = Script.of([Injection.parse(Action(line.split()[0]), line.split()[1]) for line in lines], wanted.shape, STEPS)
    failures = FailureOptions(Planner(wanted), script, lease_s=LEASE_S, restarts=0)
    checkpoint, evaluation = CheckpointOptions(4, resume=resume), EvaluationOptions(Points(), every=2)
    options = TrainOptions(5, True, checkpoint=checkpoint, evaluation=evaluation, failures=failures)
    stages = unhurried_stages(SHAPE[1], 0.02)
    plan = recycle.solve(wanted, "greedy")
    data = stages, Numbers(), loss, adamw
    return recycle.train(plan, *data, steps=STEPS, samples=BATCH, out=out, options=options, callbacks=callbacks)


def train_twice(out, make_loggers):
    """Two processes of a run: the first is asked to end after step 6, which takes a few steps, and the second goes on."""
    with pytest.raises(recycle.UserError, match=r"Stop\.on_step raised KeyError: 6; the run ends"):
        train(out, [*make_loggers(), Stop(6)], "kill W1_1@3", "rejoin W1_1@4", "kill coordinator@5")
    return train(out, make_loggers(), "kill W0_1@14", resume=True)


def recorded(out):
    """The losses of all steps and of all evaluations by the record, and the number of recoveries."""
    events = list(read_record(out / RECORD))
    losses = {event.iteration + 1: event.loss for event in events if isinstance(event, Stepped)}
    evaluations = {event.num_steps: event.loss for event in events if isinstance(event, Evaluated)}
    return losses, evaluations, sum(isinstance(event, Recovered) for event in events)


def in_csv(out):
    with (out / "metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    steps, evaluations = (
        [(int(row["step"]), float(row["loss"])) for row in rows if row["event"] == kind] for kind in ("step", "evaluation")
    )
    return steps, evaluations, sum(row["event"] == "recovery" for row in rows)


def refuse_other(out, steps, evaluations, num_recoveries):
    """Every step and every evaluation once with the loss of the record, and every recovery once."""
    losses, evaluated, wanted = recorded(out)
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert sorted(evaluated) == list(range(2, STEPS + 1, 2))
    for found, known in ((steps, losses), (evaluations, evaluated)):
        assert Counter(number for number, _ in found) == Counter(known.keys())
        assert dict(found) == pytest.approx(known)
    assert num_recoveries == wanted >= 2  # two kills; a third one if the worker that rejoins has loaded in time


def test_csv_and_tensorboard_get_every_event_once(tmp_path):
    from tests.loggers.test_tensorboard_logger import curves

    trained = train_twice(tmp_path, lambda: [recycle.CsvLogger(), recycle.TensorBoardLogger()])
    refuse_other(tmp_path, *in_csv(tmp_path))
    found = curves(tmp_path / "tensorboard")
    losses, evaluations, _ = recorded(tmp_path)
    assert found["train/loss"] == pytest.approx(losses)
    assert found[EVALUATED] == pytest.approx(evaluations)
    assert trained.num_steps == STEPS
    assert not [sentence for sentence in trained.warnings if "csv" in sentence or "tensorboard" in sentence]


def test_weights_and_biases_gets_every_event_once(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    train_twice(tmp_path, lambda: [recycle.WandbLogger(mode="offline")])
    wandb.teardown()  # ends its process, which writes the files
    rows = list(wandb_rows(tmp_path))
    steps, evaluations = ([(row["step"], row[name]) for row in rows if name in row] for name in ("train/loss", EVALUATED))
    refuse_other(tmp_path, steps, evaluations, sum("recovery/text" in row for row in rows))


def wandb_rows(folder):
    """The rows of all offline files of W&B below a folder; their run must be one."""
    from wandb.proto import wandb_internal_pb2

    runs = set()
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                runs.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
    assert len(runs) == 1


def wandb_records(content):
    """The records in a file of W&B, a log of LevelDB: blocks of 32 KiB, in them parts with checksum, length and kind."""
    block, header, whole, first, last = 1 << 15, 7, 1, 2, 4
    position, parts = header, b""
    while position < len(content):
        if block - position % block < header:
            position += block - position % block
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        part = content[position + header : position + header + length]
        position += header + length
        parts = part if kind in (whole, first) else parts + part
        if kind in (whole, last):
            yield parts


def test_mlflow_gets_every_event_once(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    out = tmp_path / "run"
    train_twice(out, lambda: [recycle.MlflowLogger(tracking_uri=uri)])
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("recycle").experiment_id])
    steps, evaluations = (
        [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
        for name in ("train/loss", EVALUATED)
    )
    refuse_other(out, steps, evaluations, sum(key.startswith("recovery.") for key in run.data.tags))
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run"
