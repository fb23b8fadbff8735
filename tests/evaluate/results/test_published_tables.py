"""The tables of the README and of docs/results have the numbers of the measured pages."""

from pathlib import Path
from statistics import median

import pytest

from recycle.evaluate.hardware.kills import read_recoveries
from recycle.evaluate.results.cluster_tables import FULL, errors_beforehand, errors_by_round
from tests.evaluate.results.published_pages import RESULTS, lines, shown

ROOT = Path(__file__).parents[3]
FOLDERS = [RESULTS / "cpu-cores", RESULTS / "gpu-slices", RESULTS / "two-cores"]
STEPS, TORCHS = ("adaptive", "decoupled", "staggered"), ("torch-1f1b", "torch-zero-bubble", "torch-zbv")


def shares(folder, *names):
    found = {line["name"]: line["share"] for line in shown(folder)["variants"]}
    return [f"{found[name]:.1%}" for name in names]


def beside(folder, name, other):
    found = {line["name"]: line["share"] for line in shown(folder)["variants"]}
    return [f"{found[name] / found[other]:.1%}"]


def errors(folder):
    return [one["found"] for one in shown(folder)["requirements"] if one["what"].startswith("predicted iteration time")]


def errors_in_rounds(folder):
    return middle_and_worst(folder, errors_by_round)


def errors_before(folder):
    return middle_and_worst(folder, errors_beforehand)


def middle_and_worst(folder, count):
    """The median and the worst of these errors."""
    found = count(lines(folder))
    return [f"{median(found):.1%}", f"{max(found):.1%}"]


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
    "predicted against measured: median error, worst": errors,
    "SIGKILL to the first op after it: median, worst of 20": kills,
}
RESULTS_ROWS = {
    "one dead, all techniques, of fault-free 1F1B": lambda folder: shares(folder, "staggered"),
    "the same, of torch's fault-free 1F1B": lambda folder: beside(folder, "staggered", "torch-1f1b"),
    "the same, of ReCycle's fault-free plan": lambda folder: beside(folder, "staggered", "all"),
    "adaptive, + decoupled, + staggered, of fault-free 1F1B": lambda folder: shares(folder, *STEPS),
    "two dead; one dead in every stage": lambda folder: shares(folder, "two-dead", "every-stage"),
    "its pipeline dropped, 1F1B": lambda folder: shares(folder, "dropped"),
    "fault-free, all techniques, of 1F1B": lambda folder: shares(folder, "all"),
    "the same, of the fastest of torch's": lambda folder: beside(folder, "all", "torch-zbv"),
    "predicted iteration time: median error, worst error": errors,
    "from a kill to the first op after it, 20 kills: median, worst": kills,
    "as above: median error, worst": errors,
    "round by round, by the profile of each round": errors_in_rounds,
    "by the first profile": errors_before,
}


def cells(page, title):
    """The cells of a row, one for each machine, as lists of numbers, without spaces and percent signs."""
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
    shown_numbers = cells(page, title)
    assert len(shown_numbers) in (2, 3)  # tables of the first two, or of all three
    assert shown_numbers == [numbers(" ".join(found(folder))) for folder in FOLDERS[: len(shown_numbers)]]


def test_the_text_on_two_cores_has_the_measured_numbers():
    folder, text = RESULTS / "two-cores", " ".join((RESULTS / "README.md").read_text(encoding="utf-8").split())
    paragraph = text[text.index("**On two cores**") : text.index("**Contention on one GPU.**")]
    times_ms = {line["name"]: line["typical_us"] / 1e3 for line in shown(folder)["variants"]}
    ours = [times_ms[name] for name in times_ms if name not in TORCHS]
    one_f_one_b, *zero_bubble = (times_ms[name] for name in TORCHS)
    (middle, worst), (typical, longest) = errors(folder), kills(folder)
    num_missed = sum(not one["is_met"] for one in shown(folder)["requirements"])
    for sentence in (
        f"predictions are {middle[:-1]} % off at the median and {worst[:-1]} % at worst",
        f"{['no', 'one', 'two', 'three', 'four', 'five'][num_missed]} of the eight targets are missed",
        f"ReCycle's plans take {min(ours):.0f} to {max(ours):.0f} ms",
        f"torch's 1F1B {one_f_one_b:.0f}, and its zero-bubble schedules {zero_bubble[0]:.0f} and {zero_bubble[1]:.0f}",
        f"median {typical}, worst {longest} of 20",
    ):
        assert sentence in paragraph


EMULATED = [RESULTS / "elastic-emulated", RESULTS / "elastic-emulated-6"]
ELASTIC_ROWS = {
    "one dead: re-routed, whole layers moved, cut": lambda folder: shares(folder, "rerouted", "moved", "cut"),
    "one dead: cut over re-routed": lambda folder: beside(folder, "cut", "rerouted"),
    "two dead in a stage: re-routed, cut": lambda folder: shares(folder, "two-rerouted", "two-cut"),
    "one dead in every stage: re-routed, cut": lambda folder: shares(folder, "every-rerouted", "every-cut"),
    "one worker at 60 %: by the old plan, known and cut": lambda folder: shares(folder, "slow", "slow-cut"),
    "nobody dead, with shared layers": lambda folder: shares(folder, "shared"),
    "predicted iteration time: median error, worst error": errors,
}
PACED = [RESULTS / "elastic-paced", RESULTS / "elastic-paced-6"]
PACED_ROWS = {
    "one dead: re-routed, cut": lambda folder: shares(folder, "rerouted", "cut"),
    "one dead: cut over re-routed": lambda folder: beside(folder, "cut", "rerouted"),
    "one worker at 60 %, known and cut": lambda folder: shares(folder, "slow-cut"),
    "predicted iteration time: median error, worst error": errors,
}
ELASTIC_README_ROWS = {
    "one dead": ("rerouted", "moved", "cut"),
    "two dead in one stage": ("two-rerouted", "two-cut"),
    "one at 60 % of its speed": ("slow", "slow-cut"),
}


def rows_below(page, heading):
    """The cells of the rows of the first table below a heading, by their titles, without bold type."""
    text = page.read_text(encoding="utf-8").replace("**", "")
    lines_below = text[text.index(heading) :].splitlines()
    start = next(number for number, line in enumerate(lines_below) if line.startswith("|"))
    table = lines_below[start : start + next(n for n, line in enumerate(lines_below[start:]) if not line.startswith("|"))]
    return {title.strip(): rest for title, *rest in (line.strip("|").split("|") for line in table)}


@pytest.mark.parametrize("title", ELASTIC_ROWS)
def test_a_row_of_elastic_cuts_has_the_numbers_of_the_emulated_pages(title):
    _, *measured = rows_below(RESULTS / "README.md", "## Elastic cuts")[title]
    assert [numbers(cell) for cell in measured[:2]] == [numbers(" ".join(ELASTIC_ROWS[title](folder))) for folder in EMULATED]


@pytest.mark.parametrize("title", PACED_ROWS)
def test_a_row_of_paced_cores_has_the_numbers_of_their_pages(title):
    _, *measured = rows_below(RESULTS / "README.md", "On 16 cores")[title]
    assert [numbers(cell) for cell in measured] == [numbers(" ".join(PACED_ROWS[title](folder))) for folder in PACED]


def test_the_errors_of_all_elastic_pages_are_those_of_their_rows():
    folders = [*EMULATED, *PACED, RESULTS / "elastic-slices", RESULTS / "elastic-slices-6"]
    found = [abs(line.error(FULL)) for folder in folders for line in lines(folder)]
    says = (
        f"Over all {len(found)} rows of these studies on paced cores, slices and emulated devices they are "
        f"{median(found) * 100:.1f} % off at the median and {max(found) * 100:.1f} % at worst."
    )
    assert says in " ".join((RESULTS / "README.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize("title", ELASTIC_README_ROWS)
def test_a_row_of_the_readme_on_cuts_has_the_numbers_of_the_emulated_page(title):
    *measured, _ = rows_below(ROOT / "README.md", "**With [elastic cuts]".replace("**", ""))[title]
    assert numbers(" ".join(measured)) == numbers(" ".join(shares(EMULATED[0], *ELASTIC_README_ROWS[title])))
