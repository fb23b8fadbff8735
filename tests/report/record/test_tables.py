"""Tables for a terminal and for Markdown."""

from recycle.core.events.record import Spell
from recycle.report.record.metrics import measure
from recycle.report.record.tables import aligned, campaign_table, markdown, pause_table, seed_table, spread_text

RUNS = {
    "recycle": measure([Spell(0, 3_600_000_000, "train", samples=36_000, busy_us=1_800_000_000)]),
    "oobleck": measure(
        [Spell(0, 1_800_000_000, "train", samples=9_000), Spell(1_800_000_000, 3_600_000_000, "pause", "reconfigure")]
    ),
}


def test_a_row_says_throughput_and_where_the_time_went():
    head, recycle, oobleck = campaign_table(RUNS, 20.0, {"recycle": 12.5, "oobleck": 10.0}, 25.0)
    cells = dict(zip(head, recycle, strict=True))
    assert (cells["samples/s"], cells["bubble"], cells["paused"]) == ("10", "50.0%", "–")
    assert (cells["of 1F1B"], cells["of own"], cells["of best"]) == ("50.0%", "80.0%", "40.0%")
    assert oobleck[2:5] == ["12.5%", "25.0%", "10.0%"]  # 2.5 samples a second
    assert dict(zip(head, oobleck, strict=True))["paused"] == "30 min"


def test_pauses_have_a_column_for_each_cause_that_occurs():
    assert pause_table(RUNS) == [["paused by cause", "reconfigure"], ["oobleck", "30 min"]]
    assert pause_table({"recycle": RUNS["recycle"]}) == []


def test_columns_line_up_in_a_terminal():
    assert aligned([["a", "1"], ["long", "10"]]) == "a      1\nlong  10"


def test_markdown_sets_numbers_to_the_right():
    assert markdown([["a", "b"], ["x", "1"]]).splitlines() == ["| a | b |", "|---|---:|", "| x | 1 |"]


def test_the_causes_add_up_to_the_time_paused():
    spells = [
        Spell(0, 60_000_000, "checkpoint"),
        Spell(60_000_000, 180_000_000, "pause", "checkpoint"),
        Spell(180_000_000, 480_000_000, "pause", "restart"),
    ]
    runs = {"varuna": measure(spells)}
    cells = dict(zip(*campaign_table(runs, 1.0, {"varuna": 0.0}, 1.0), strict=True))
    assert cells["paused"] == "8 min"
    assert cells["of own"] == "–"  # a system that cannot run the job
    assert pause_table(runs) == [["paused by cause", "checkpoint", "restart"], ["varuna", "3 min", "5 min"]]


def test_means_over_seeds_have_their_intervals_and_mean_times():
    runs = {"oobleck": [RUNS["oobleck"], RUNS["recycle"]]}
    head, row = seed_table(runs, {"oobleck": [(6.25, 1.5), (0.5, 0.12), None, (0.25, None)]})
    assert head == ["system", "samples/s", "of 1F1B", "of own", "of best", "paused", "redo", "down"]
    assert row == ["oobleck", "6.25 ± 1.5", "50.0% ± 12.0%", "–", "25.0%", "15 min", "–", "–"]


def test_half_an_interval_has_no_exponent():
    assert spread_text((12345.6, 123.4), ".4g") == "1.235e+04 ± 123"
    assert spread_text((5.0, 0.0123), ".4g") == "5 ± 0.012"
