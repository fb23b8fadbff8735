"""The log for TensorBoard, read back with TensorBoard's own reader."""

import math
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recycle.cli.training.tensorboard import TensorBoardLog
from recycle.core.errors import FileProblem
from recycle.core.events.record import Event, Held, OpRan, Saved, Spell, Started, Stepped, Warned

pytestmark = pytest.mark.timeout(120)
SECOND = 1_000_000
Curves = dict[str, dict[int, float]]


def step(iteration: int, at_s: float, loss: float | None = 1.0, norm: float | None = 1.0) -> Stepped:
    return Stepped(iteration, round(at_s * SECOND), loss, norm, None if loss is None else 1.0)


def spell(start_s: float, end_s: float, samples: int, state: str = "train") -> Spell:
    return Spell(round(start_s * SECOND), round(end_s * SECOND), state, samples=samples, num_live=4)


def write(folder: Path, events: list[Event], num_done: int = 0) -> None:
    with closing(TensorBoardLog(folder, num_done)) as log:
        for event in events:
            log.on_event(event)


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
    write(
        tmp_path,
        [
            Started("train", "8-layer GPT"),
            OpRan(0, "W0_0", "0F0@0", 0, 5),
            step(0, 2.0, 5.5, 1.25),
            spell(0, 2.0, 36),
            step(1, 2.5, 5.25, 0.75),
            spell(2.0, 2.5, 36),
            Held("W0_0", 1000, 600, 500),
            Saved(2_500_000, 2, "runs/a", 1),
            Warned(2_500_000, "slow"),
            step(2, 4.5, 4.0, 0.5),
            spell(2.5, 4.5, 36),
        ],
    )
    assert curves(tmp_path) == {
        "train/loss": {1: 5.5, 2: 5.25, 3: 4.0},
        "train/gradient_norm": {1: 1.25, 2: 0.75, 3: 0.5},
        "train/iteration_seconds": {2: 0.5, 3: 2.0},
        "train/samples_per_second": {1: 18.0, 2: 72.0, 3: 18.0},
    }


def test_it_does_not_matter_whether_a_step_or_its_spell_is_told_first(tmp_path: Path) -> None:
    steps, spells = [step(0, 1), step(1, 3)], [spell(0, 1, 10), spell(1, 3, 40)]
    write(tmp_path / "a", [steps[0], spells[0], steps[1], spells[1]])
    write(tmp_path / "b", [spells[0], steps[0], spells[1], steps[1]])
    assert curves(tmp_path / "a") == curves(tmp_path / "b")
    assert curves(tmp_path / "a")["train/samples_per_second"] == {1: 10.0, 2: 20.0}


def test_a_pause_has_no_pace_and_a_long_spell_has_one_for_its_last_step(tmp_path: Path) -> None:
    write(tmp_path, [step(0, 1), step(1, 2), spell(0, 2, 30), spell(2, 5, 0, "pause"), spell(5, 6, 9, "redo"), step(2, 7)])
    assert curves(tmp_path)["train/samples_per_second"] == {2: 15.0}
    assert curves(tmp_path)["train/iteration_seconds"] == {2: 1.0, 3: 5.0}


def test_a_loss_that_is_not_finite_is_written_as_no_number(tmp_path: Path) -> None:
    write(tmp_path, [step(0, 1), step(1, 2, None, None)])
    found = curves(tmp_path)
    assert found["train/loss"][1] == 1.0
    assert math.isnan(found["train/loss"][2])
    assert math.isnan(found["train/gradient_norm"][2])


def test_a_run_that_goes_on_hides_the_steps_that_it_trains_again(tmp_path: Path) -> None:
    write(tmp_path, [step(number, number + 1, 10.0 + number) for number in range(5)])
    # TensorBoard reads the files of a folder in the order of their names, which begin with the second they were made in.
    (first,) = tmp_path.iterdir()
    first.rename(tmp_path / "events.out.tfevents.0000000001.before")
    write(tmp_path, [step(number, number + 1, 20.0 + number) for number in range(3, 6)], num_done=3)
    assert curves(tmp_path)["train/loss"] == {1: 10.0, 2: 11.0, 3: 12.0, 4: 23.0, 5: 24.0, 6: 25.0}


def test_what_a_failing_run_told_is_on_disk(tmp_path: Path) -> None:
    def fail() -> None:
        with closing(TensorBoardLog(tmp_path)) as log:
            log.on_event(step(0, 1, 3.5))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert curves(tmp_path)["train/loss"] == {1: 3.5}


@pytest.mark.parametrize("missing", ["torch", "tensorboard"])
def test_without_torch_or_tensorboard_it_says_what_to_install(tmp_path: Path, missing: str) -> None:
    # In a process of its own, because here both are imported already.
    code = f"""
import sys
from recycle.cli.training.tensorboard import TensorBoardLog
from recycle.core.errors import UserError
sys.modules[{missing!r}] = None
try:
    TensorBoardLog("log")
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
    with pytest.raises(FileProblem, match=r"^cannot write .*file/log: Not a directory; choose a folder"):
        TensorBoardLog(tmp_path / "file" / "log")
