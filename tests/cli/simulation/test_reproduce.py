"""`recycle reproduce`: what it prints and writes, and what a user can get wrong."""

import json
from pathlib import Path

import pytest

from recycle.cli.main import main
from recycle.sim.reproduce import throughput_table as table
from tests.cli.commands import output_of, refusal
from tests.cli.simulation.test_simulate import PNG
from tests.sim.reproduce.small_reproduction import shrink


@pytest.fixture(autouse=True)
def _small_experiments(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


def test_the_page_has_assumptions_and_a_table_for_each_caption(folder: Path) -> None:
    lines = output_of("reproduce table").splitlines()
    assert lines[0] == "# The published table, made again"
    assert lines[2] == "Made by `recycle reproduce table`."
    assert "## Assumptions" in lines
    assert "## Samples a second, by the time between two failures" in lines
    row = next(line for line in lines if line.startswith("| gpt3-medium, oobleck |"))
    assert row.split(" | ")[1] == "27.26"  # the published number for a failure every 6 h
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["table", "ablation", "scale"])
def test_out_is_a_page_a_picture_and_the_numbers(name: str, folder: Path) -> None:
    page = output_of(f"reproduce {name} --out results")
    assert sorted(path.name for path in (folder / "results").iterdir()) == [f"{name}.json", f"{name}.md", f"{name}.png"]
    assert (folder / "results" / f"{name}.md").read_text() == page.removesuffix("\n")
    assert f"]({name}.png)" in page
    assert (folder / "results" / f"{name}.png").read_bytes().startswith(PNG)
    written = json.loads((folder / "results" / f"{name}.json").read_text())
    assert set(written) == {"experiment", "assumptions", "results"}
    assert written["experiment"] == name
    assert json.loads(output_of(f"reproduce {name} --json")) == written


def test_the_planner_is_an_experiment_too(folder: Path) -> None:
    found = json.loads(output_of("reproduce planner --json"))
    assert [library["plans"] for library in found["results"].values()] == [2, 2]


@pytest.mark.slow
def test_the_same_command_gives_the_same_bytes_with_and_without_a_cache(folder: Path) -> None:
    made = []
    for options in ("--cache one", "--cache two", "--cache one", "--no-cache"):
        output_of(f"reproduce ablation --out results {options}")
        made.append({path.name: path.read_bytes() for path in (folder / "results").iterdir()})
    assert made == [made[0]] * 4


def test_no_cache_keeps_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    output_of("reproduce table --no-cache")
    assert sorted(tmp_path.rglob("*")) == [folder]
    output_of("reproduce table")
    assert list((tmp_path / "cache" / "recycle").glob("timings-*.json"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "the following arguments are required: experiment"),
        ("figure9", "invalid choice: 'figure9'"),
        ("table --out file", "file is not a folder that you may write to; choose another one"),
        ("table --out file/inside", "file is not a folder that you may write to; choose another one"),
        ("table --cache file", "file is not a folder that you may write to; choose another one"),
        ("table --seeds 3", "unrecognized arguments: --seeds 3"),
    ],
)
def test_what_cannot_be_used_is_explained_before_anything_is_run(
    arguments: str, sentence: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "parallel_map", lambda *_: pytest.fail("worked in vain"))
    (folder / "file").write_text("mine")
    assert sentence in refusal(f"reproduce {arguments}")
    assert (folder / "file").read_text() == "mine"


def test_help_names_the_experiments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["reproduce", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in ("table", "ablation", "scale", "planner"))
    assert "recycle reproduce table" in text.split("examples:")[1]
