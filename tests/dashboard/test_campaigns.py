"""Results of campaigns as tables: every column has a name and a unit, and what is not shown is said."""

import json
from pathlib import Path

import pytest

from recycle.cli.main import main
from recycle.dashboard.reading.served_folder import ServedFolder
from recycle.dashboard.views.campaigns import campaign
from recycle.dashboard.views.reproduced_rows import CONDITIONS
from recycle.sim.reproduce import ablation, fail_slow, scale
from recycle.sim.reproduce.published_numbers import INTERVALS_H

RESULTS = Path(__file__).parents[2] / "docs" / "reproduction"
JOB = ("--model", "gpt3-medium", "--gpu", "a100-80", "--json", "--no-cache", "--seeds", "2")


def show(path):
    return campaign(path, ServedFolder(path.parent))


def write(path, data):
    path.write_text(json.dumps(data))
    return show(path)


def look(table, texts, column):
    """The number in a column of the row with these texts."""
    (row,) = (row for row in table["rows"] if tuple(row[: len(texts)]) == texts)
    return row[table["columns"].index(column)]


# An experiment, the texts of a row, a column with its unit, and how to find the same number in the file.
CELLS = [
    ("table", ("gpt3-medium", "recycle"), "published, a failure every 2 h", "samples/s", ("gpt3-medium/recycle", "published", 1)),
    ("table", ("gpt3-medium", "oobleck"), "ours, a failure every 0.5 h", "samples/s", ("gpt3-medium/oobleck", "ours", 2)),
    ("table", ("gpt3-medium", "1F1B"), "without failures", "samples/s", ("fault-free", "gpt3-medium", "1F1B")),
    ("ablation", ("gpt3-6.7b", "+ staggered"), "4 dead", "share of fault-free 1F1B", ("gpt3-6.7b", "+ staggered", 3)),
    (
        "ablation",
        ("gpt3-6.7b", "odyssey-rerouting"),
        "period over that of our plan, 1 dead",
        "×",
        ("gpt3-6.7b/odyssey-rerouting", "period over that of our plan", 0),
    ),
    ("ablation", ("gpt3-6.7b", "adaptive"), "nobody dead", "share of fault-free 1F1B", ("gpt3-6.7b/fault-free", "adaptive")),
    (
        "scale",
        ("gpt-18.4b, 256 GPUs, 4 x 8", "recycle"),
        "5 % dead",
        "share of fault-free 1F1B",
        ("gpt-18.4b, 256 GPUs, 4 x 8", "recycle", 1),
    ),
    ("scale", ("month", "oobleck"), "a month", "share of fault-free 1F1B", ("month", "oobleck")),
    ("slow", ("gpt-18.4b, 4 x 8", "resihp"), "5 % slow", "share of fault-free 1F1B", ("gpt-18.4b, 4 x 8", "resihp", 1)),
    (
        "slow",
        ("gpt-18.4b, 4 x 8: drift", "recycle"),
        "a day",
        "share of fault-free 1F1B",
        ("gpt-18.4b, 4 x 8: drift", "recycle"),
    ),
    (
        "thousand",
        ("one failure in 264 GPU-days", "recycle"),
        "what failures add",
        "percentage points of fault-free 1F1B",
        ("one failure in 264 GPU-days", "recycle", "fault_points", "mean"),
    ),
    (
        "thousand",
        ("one failure in 264 GPU-days", "recycle"),
        "throughput",
        "samples/s",
        ("one failure in 264 GPU-days", "recycle", "throughput", "mean"),
    ),
    ("planner", ("4 x 64, 256 micro-batches",), "planning time", "s", ("4 x 64, 256 micro-batches", "seconds")),
]


@pytest.mark.parametrize(("experiment", "texts", "column", "unit", "keys"), CELLS)
def test_our_own_results_are_shown_with_names_and_units(experiment, texts, column, unit, keys):
    path = RESULTS / f"{experiment}.json"
    table, expected = show(path), json.loads(path.read_text())["results"]
    for key in keys:
        expected = expected[key]
    assert look(table, texts, column) == expected
    assert table["units"][table["columns"].index(column)] == unit


@pytest.mark.parametrize("experiment", ["table", "ablation", "scale", "slow", "thousand", "planner"])
def test_no_column_of_our_own_results_is_a_mere_number(experiment):
    table = show(RESULTS / f"{experiment}.json")
    for column in table["columns"]:
        assert not any(word.isdigit() and column.startswith(("name", "value", word + ",")) for word in column.split()), column
        assert not column.isdigit()
    assert len(set(table["columns"])) == len(table["columns"]) == len(table["units"])
    assert all(len(row) == len(table["columns"]) for row in table["rows"])


def test_lists_that_are_not_shown_are_named():
    (sentence,) = show(RESULTS / "thousand.json")["missing"]
    assert "failures of each seed, throughputs" in sentence
    assert show(RESULTS / "table.json")["missing"] == []


def test_conditions_are_those_of_the_experiments():
    assert CONDITIONS["scale"] == tuple(f"{100 * share:g} % dead" for share in scale.SHARES)
    assert CONDITIONS["slow"] == tuple(f"{100 * share:g} % slow" for share in fail_slow.SHARES)
    assert CONDITIONS["ablation"] == tuple(f"{count + 1} dead" for count in range(ablation.MOST_FAILURES))
    assert CONDITIONS["table"] == tuple(f"a failure every {hours:g} h" for hours in INTERVALS_H)


def test_intervals_stand_beside_their_shares(tmp_path):
    interval = {"mean": 0.9, "low": 0.88, "high": 0.92}
    results = {"4 x 8": {"recycle": [0.9, 0.8, 0.7]}, "intervals": {"4 x 8": {"recycle": [interval] * 3}}}
    table = write(tmp_path / "scale.json", {"experiment": "scale", "results": results})
    assert look(table, ("4 x 8", "recycle"), "5 % dead") == 0.8
    assert look(table, ("4 x 8", "recycle"), "5 % dead, 90 % interval from") == 0.88


def test_several_runs_of_a_system_are_rows_beside_their_mean(tmp_path):
    runs = [{"throughput": rate, "pauses_us": {"detect": 7}} for rate in (1.0, 2.0)]
    own = {"throughput": {"mean": 1.5, "low": 0.5, "high": 2.5}, "goodput": None, "runs": runs}
    data = {"fault_free": 2.0, "failures": [3, 4], "paid": {"recycle": {"gpus": 16}}, "systems": {"recycle": own}}
    table = write(tmp_path / "s.json", data)
    assert table["title"].endswith("failures: 3, 4")
    assert [row[:3] for row in table["rows"]] == [
        ["recycle", "mean of 2 runs", 1.5],
        ["recycle", "run 1", 1.0],
        ["recycle", "run 2", 2.0],
    ]
    assert look(table, ("recycle", "mean of 2 runs"), "GPUs that are paid for") == 16
    assert look(table, ("recycle", "run 1"), "pause: detect") == 7


@pytest.mark.slow
def test_what_simulate_prints_is_shown_by_system_and_run(capsys, tmp_path):
    shape = ("--pipelines", "2", "--stages", "2", "--microbatches", "2", "--shared-layers", "0", "--systems", "recycle,oobleck")
    main(["simulate", *JOB, *shape, "--interval", "30m", "--hours", "1"])
    data = json.loads(capsys.readouterr().out)
    table = write(tmp_path / "s.json", data)
    units = dict(zip(table["columns"], table["units"], strict=True))
    assert table["columns"][:3] == ["system", "which", "throughput"]
    assert {row[1] for row in table["rows"]} == {"mean of 2 runs", "run 1", "run 2"}
    own = data["systems"]["recycle"]
    assert look(table, ("recycle", "mean of 2 runs"), "throughput") == own["throughput"]["mean"]
    assert look(table, ("recycle", "run 2"), "pause: detect") == own["runs"][1]["pauses_us"]["detect"]
    assert (units["throughput"], units["pause: detect"]) == ("samples/s", "µs")


def test_what_advise_prints_is_shown_by_choice(capsys, tmp_path):
    cluster = ("--gpus", "8", "--batch", "16", "--mtbf", "20d", "--repair", "24h", "--days", "1", "--systems", "oobleck,varuna")
    main(["advise", *JOB, *cluster])
    data = json.loads(capsys.readouterr().out)
    table = write(tmp_path / "a.json", data)
    first = table["rows"][0]
    assert first[:3] == [data["first"]["system"], "first", data["first"]["shape"]["num_pipelines"]]
    units = dict(zip(table["columns"], table["units"], strict=True))
    assert first[table["columns"].index("memory of a GPU")] == data["first"]["memory_bytes"]
    assert (units["memory of a GPU"], units["throughput in tokens"]) == ("bytes", "tokens/s")
    assert {row[0] for row in table["rows"]} == {group["system"] for group in data["systems"] if group["best"]}


def test_rows_and_columns_that_are_cut_are_counted(tmp_path):
    facts = {f"n{number}": number for number in range(70)}
    systems = {f"s{number}": facts for number in range(2001)}
    table = write(tmp_path / "many.json", {"fault_free": 1, "systems": systems})
    assert table["missing"] == ["11 of 71 columns are not shown", "1 of 2001 rows are not shown"]
    assert len(table["rows"]) == 2000


@pytest.mark.parametrize(
    "results",
    [
        {"fault-free": 3, "month": [1], "intervals": {"a": 5}, "others": {"b": None}, "failures": {}},
        {"fault-free": {"a": 3, "1F1B": {"x": [[]]}}, "a/b": {"published": "?", "intervals": {"mean": 1}}, "": {"": {"": {}}}},
        {"a": {"period over that of our plan": "x", "b": [True, "c", 10**400, {"mean": "m", "low": [], "high": {}}]}},
    ],
)
@pytest.mark.parametrize("experiment", ["table", "ablation", "scale", "slow", "thousand", "planner", "other"])
def test_results_of_another_form_are_shown_as_far_as_they_are_numbers(tmp_path, experiment, results):
    table = write(tmp_path / "x.json", {"experiment": experiment, "assumptions": 5, "results": results})
    assert all(value is None or isinstance(value, str | int | float) for row in table["rows"] for value in row)
