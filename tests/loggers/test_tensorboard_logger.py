"""The log for TensorBoard, read back with TensorBoard's own reader."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recycle.core.errors import FileProblem
from recycle.core.events.record import Evaluated, Recovered
from recycle.loggers.tensorboard_logger import TensorBoardLogger
from recycle.runtime.callbacks.protocol import RunStart, StepMetrics

pytestmark = pytest.mark.timeout(120)
Curves = dict[str, dict[int, float]]


def write(folder: Path, steps: list[StepMetrics], num_done: int = 0) -> None:
    logger = TensorBoardLogger(folder)
    logger.on_start(RunStart(None, num_done > 0, num_done))
    for step in steps:
        logger.on_step(step)
    logger.on_end(None)


def curves(folder: Path) -> Curves:
    """Every curve in the folder: its values by step."""
    reader = EventAccumulator(str(folder))
    reader.Reload()
    found: Curves = {}
    for name in reader.Tags()["scalars"]:
        points = reader.Scalars(name)
        found[name] = {point.step: point.value for point in points}
        assert len(found[name]) == len(points), f"{name} has two values at one step"
    return found


def test_every_step_has_its_loss_norm_pace_and_time(tmp_path: Path) -> None:
    write(tmp_path, [StepMetrics(1, 5.5, 1.25, 1.0, None, 18.0), StepMetrics(2, 5.25, 0.75, 1.0, 0.5, 72.0)])
    assert curves(tmp_path) == {
        "train/loss": {1: 5.5, 2: 5.25},
        "train/gradient_norm": {1: 1.25, 2: 0.75},
        "train/iteration_seconds": {2: 0.5},
        "train/samples_per_second": {1: 18.0, 2: 72.0},
    }


def test_evaluations_and_recoveries_are_curves_too(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    logger.on_start(RunStart(tmp_path))
    logger.on_evaluate(Evaluated(1, 4, 2.5))
    logger.on_recovery(Recovered(1, 9, 2, ("W0_1",), False, "it died", 6, regroup_us=500_000, num_live=3))
    logger.on_end(None)
    assert curves(tmp_path / "tensorboard") == {
        "evaluation/loss": {4: 2.5},
        "recovery/lost_seconds": {7: 0.5},
        "recovery/live_workers": {7: 3.0},
    }


def test_a_loss_that_is_not_finite_is_written_as_no_number(tmp_path: Path) -> None:
    write(tmp_path, [StepMetrics(1, 1.0, 1.0), StepMetrics(2, None, None)])
    found = curves(tmp_path)
    assert found["train/loss"][1] == 1.0
    assert math.isnan(found["train/loss"][2])
    assert math.isnan(found["train/gradient_norm"][2])


def test_a_run_that_goes_on_hides_the_steps_that_it_trains_again(tmp_path: Path) -> None:
    write(tmp_path, [StepMetrics(number, 10.0 + number, 1.0) for number in range(1, 6)])
    # TensorBoard reads the files of a folder in the order of their names, which begin with the second they were made in.
    (first,) = tmp_path.iterdir()
    first.rename(tmp_path / "events.out.tfevents.0000000001.before")
    write(tmp_path, [StepMetrics(number, 20.0 + number, 1.0) for number in range(4, 7)], num_done=3)
    assert curves(tmp_path)["train/loss"] == {1: 11.0, 2: 12.0, 3: 13.0, 4: 24.0, 5: 25.0, 6: 26.0}


@pytest.mark.parametrize("missing", ["torch", "tensorboard"])
def test_without_torch_or_tensorboard_it_says_what_to_install(tmp_path: Path, missing: str) -> None:
    # In a process of its own, because here both are imported already.
    code = f"""
import sys
from recycle.loggers.tensorboard_logger import TensorBoardLogger
from recycle.core.errors import UserError
sys.modules[{missing!r}] = None
try:
    TensorBoardLogger("log")
except UserError as problem:
    print(problem)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True)
    assert run.stdout.startswith("a log for TensorBoard needs torch and tensorboard (")
    assert run.stdout.endswith("): install them with pip install -e '.[tensorboard]' in a clone of ReCycle\n")
    assert run.stdout.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FileProblem, match=r"^cannot write .*file/log/events"):
        TensorBoardLogger(tmp_path / "file" / "log")
