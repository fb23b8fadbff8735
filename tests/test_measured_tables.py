"""The tables of the README and of docs/results say what the measured pages say."""

import json
from pathlib import Path
from statistics import median

import pytest

from recycle.bench.recoveries import read_recoveries

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
FOLDERS = [RESULTS / "cpu-cores", RESULTS / "gpu-slices"]
STEPS, TORCHS = ("adaptive", "decoupled", "staggered"), ("torch-1f1b", "torch-zero-bubble", "torch-zbv")
ERRORS = "predicted against measured: median error, worst"


def facts(folder):
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def shares(folder, *names):
    found = {line["name"]: line["share"] for line in facts(folder)["lines"]}
    return [f"{found[name]:.1%}" for name in names]


def beside(folder, name, other):
    found = {line["name"]: line["share"] for line in facts(folder)["lines"]}
    return [f"{found[name] / found[other]:.1%}"]


def errors(folder):
    return [one["found"] for one in facts(folder)["asked"] if one["what"].startswith("predicted iteration time")]


def kills(folder):
    times_ms = [one.took_us / 1e3 for one in read_recoveries(folder) if not one.joins]
    return [f"{median(times_ms):.0f} ms", f"{max(times_ms):.0f} ms"]


README_ROWS = {
    "fault-free, all techniques": lambda folder: shares(folder, "all"),
    "torch.distributed.pipelining: 1F1B, ZB1P, ZBV": lambda folder: shares(folder, *TORCHS),
    "W1_2 dead, its pipeline dropped": lambda folder: shares(folder, "dropped"),
    "W1_2 dead: adaptive, + decoupled, + staggered": lambda folder: shares(folder, *STEPS),
    "one dead in every stage": lambda folder: shares(folder, "every-stage"),
    "W1_2 dead, of fault-free with all techniques": lambda folder: beside(folder, "staggered", "all"),
    ERRORS: errors,
    "SIGKILL to the first op after it: median, worst of 20": kills,
}
RESULTS_ROWS = {
    "one of twelve dead, all techniques, of fault-free 1F1B": lambda folder: shares(folder, "staggered"),
    "the same, of torch's own fault-free 1F1B": lambda folder: beside(folder, "staggered", "torch-1f1b"),
    "the same, of ReCycle's own fault-free plan": lambda folder: beside(folder, "staggered", "all"),
    "adaptive, + decoupled, + staggered, of fault-free 1F1B": lambda folder: shares(folder, *STEPS),
    "two dead; one dead in every stage": lambda folder: shares(folder, "two-dead", "every-stage"),
    "its whole pipeline dropped instead, 1F1B by the others": lambda folder: shares(folder, "dropped"),
    "fault-free, all techniques, of 1F1B": lambda folder: shares(folder, "all"),
    "the same, of the fastest of torch's schedules": lambda folder: beside(folder, "all", "torch-zbv"),
    ERRORS: errors,
    "SIGKILL to the first op after it, 20 kills: median, worst": kills,
}


def cells(page, title):
    """The two cells of a row, as numbers in words: spaces, and percent signs, are for readers."""
    row = next(line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {title} |"))
    return [numbers(cell) for cell in row.strip("| ").split("|")[1:]]


def numbers(text):
    return [word.strip(",;%") for word in text.split() if word[0].isdigit()]


@pytest.mark.parametrize(
    ("page", "title", "found"),
    [(ROOT / "README.md", *row) for row in README_ROWS.items()] + [(RESULTS / "README.md", *row) for row in RESULTS_ROWS.items()],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_row_has_the_numbers_of_the_pages(page, title, found):
    assert cells(page, title) == [numbers(" ".join(found(folder))) for folder in FOLDERS]
