"""The CSV log: a row for every step, evaluation and recovery; a resumed run goes on in it."""

import csv

import pytest

from recycle.core.errors import FileProblem, UserError
from recycle.core.events.record import Evaluated, Recovered
from recycle.loggers.csv_logger import CsvLogger
from recycle.loggers.select import make_loggers
from recycle.runtime.callbacks.protocol import RunStart, StepMetrics

LOST = Recovered(1, 9, 2, ("W0_1",), False, "it died", 2, regroup_us=500_000, num_live=3)


def rows(path):
    with path.open(newline="") as stream:
        return [{key: value for key, value in row.items() if value} for row in csv.DictReader(stream)]


def test_every_event_is_a_row(tmp_path):
    logger = CsvLogger()
    logger.on_start(RunStart(tmp_path))
    logger.on_step(StepMetrics(1, 5.5, 1.25, 1.0, None, 18.0))
    logger.on_step(StepMetrics(2, None, 1.25, 1.0, 0.5, 18.0))
    logger.on_recovery(LOST)
    logger.on_evaluate(Evaluated(1, 2, 2.5))
    assert rows(tmp_path / "metrics.csv") == [  # before the end, too
        {"event": "step", "step": "1", "loss": "5.5", "gradient_norm": "1.25", "samples_per_s": "18.0"},
        {"event": "step", "step": "2", "gradient_norm": "1.25", "iteration_s": "0.5", "samples_per_s": "18.0"},
        {"event": "recovery", "step": "3", "lost_s": "0.5", "live_workers": "3", "text": "step 3: lost W0_1 (it died)"},
        {"event": "evaluation", "step": "2", "loss": "2.5"},
    ]
    logger.on_end(None)


def test_a_resumed_run_drops_the_rows_of_steps_that_it_trains_again(tmp_path):
    path = tmp_path / "log.csv"
    for run, numbers in ((RunStart(tmp_path), (1, 2, 3)), (RunStart(tmp_path, True, 2), (3, 4))):
        logger = CsvLogger(path)
        logger.on_start(run)
        for number in numbers:
            logger.on_step(StepMetrics(number, 10.0 * len(numbers) + number, 1.0))
        logger.on_recovery(LOST)
        logger.on_end(None)
        with path.open("a") as stream:
            stream.write("step,4")  # a row that was cut off
    found = rows(path)[:-1]
    assert [row["loss"] for row in found if row["event"] == "step"] == ["31.0", "32.0", "23.0", "24.0"]
    assert [row["event"] for row in found].count("recovery") == 2


def test_a_new_run_replaces_the_file(tmp_path):
    (tmp_path / "metrics.csv").write_text("something else")
    logger = CsvLogger()
    logger.on_start(RunStart(tmp_path))
    logger.on_end(None)
    assert rows(tmp_path / "metrics.csv") == []


def test_without_a_run_folder_a_file_must_be_named():
    with pytest.raises(FileProblem, match="this run has none: name a file"):
        CsvLogger().on_start(RunStart())


@pytest.mark.parametrize(
    ("names", "folder", "says"),
    [
        (["csv", "paper"], "runs", "there is no logger 'paper': choose from csv, mlflow, tensorboard, wandb"),
        (["csv"], None, "the csv log is written beside the results: name a folder with --out"),
        (["tensorboard"], None, "the tensorboard log is written beside the results"),
    ],
)
def test_a_logger_that_cannot_be_had_is_one_sentence(names, folder, says):
    with pytest.raises(UserError, match=says):
        make_loggers(names, folder)


@pytest.mark.parametrize(("name", "package"), [("wandb", "wandb"), ("mlflow", "mlflow-skinny")])
def test_a_logger_whose_library_is_missing_says_what_to_install(name, package, monkeypatch):
    monkeypatch.setattr("recycle.loggers.log_values.find_spec", lambda module: None)
    with pytest.raises(UserError, match=f"needs the Python package {package}, which is not installed: pip install {package}"):
        make_loggers([name], None)
