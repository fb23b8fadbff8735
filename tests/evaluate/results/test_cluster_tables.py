"""A measured cluster in tables and as a picture."""

from dataclasses import replace

import pytest

from recycle.evaluate.results.cluster_chart import draw_cluster
from recycle.evaluate.results.cluster_tables import (
    BEFOREHAND,
    BEST,
    WAYS,
    Asked,
    Line,
    Prediction,
    asked_table,
    errors_asked,
    errors_beforehand,
    errors_by_round,
    middle_mean,
    prediction_table,
    share_text,
    throughput_table,
    times_table,
)


def line(name, times_ms, num_samples=54, predicted_ms=(), dead=""):
    times_us = {number: [took * 1e3] for number, took in enumerate(times_ms)}
    predictions = {
        number: Prediction(took * 1e3 - 30, took * 1e3 - 20, took * 1e3 - 10, took * 1e3)
        for number, took in enumerate(predicted_ms)
    }
    losses = {number: [4.0, 3.5] for number in times_us}
    return Line(name, name.upper(), dead, times_us, num_samples, losses, predictions)


def test_what_is_typical_is_the_mean_of_the_middle_half():
    assert middle_mean([5, 1, 2, 4, 3, 99, 6, -70]) == pytest.approx((2 + 3 + 4 + 5) / 4)
    # Where long and short iterations alternate it is what an iteration takes on average, and a median is not.
    assert middle_mean([100, 110] * 8 + [100]) == pytest.approx(105, abs=1)
    assert middle_mean([7]) == 7
    assert line("a", [100, 100, 100, 900]).typical_us == 100e3


def test_a_share_is_of_what_is_typical_for_each():
    # The machine was three times as slow in the second round, and both were hit.
    yardstick, other = line("a", [100, 300, 100, 100]), line("b", [80, 240, 80, 80])
    assert other.share_of(yardstick) == pytest.approx(100 / 80)
    assert yardstick.share_of(yardstick) == 1


def test_throughput_counts_samples():
    # As long an iteration, but of two thirds of the samples.
    small = line("small", [100], num_samples=36)
    assert small.share_of(line("a", [100])) == pytest.approx(2 / 3)
    assert small.samples_per_s == pytest.approx(360)


def test_an_error_is_the_median_prediction_beside_what_is_typical():
    found = line("a", [100, 200, 200, 400], predicted_ms=[103, 206, 206, 300])
    assert found.predicted_us(BEST) == 206e3
    assert found.error(BEST) == pytest.approx(0.03)


def test_each_way_of_predicting_has_its_column_and_its_error():
    head, row = prediction_table([line("a", [100], predicted_ms=[101]), line("torch", [90])])
    assert head == ["variant", *WAYS, BEFOREHAND, "measured ms"]
    assert row == ["A", "101.0 (+1.0%)", "101.0 (+1.0%)", "101.0 (+1.0%)", "101.0 (+1.0%)", "–", "100.0"]


def test_what_was_known_beforehand_is_beside_what_was_rehearsed_in_between():
    known = replace(line("a", [100], predicted_ms=[101]), beforehand=Prediction(70e3, 80e3, 85e3, 94e3))
    assert prediction_table([known])[1][-2:] == ["94.0 (-6.0%)", "100.0"]
    assert errors_beforehand([known, line("torch", [90])]) == [pytest.approx(0.06)]


def test_errors_round_by_round_are_of_each_rounds_own_turn():
    # The median prediction is right; each round's own is not.
    assert errors_by_round([line("a", [100, 110], predicted_ms=[110, 99]), line("torch", [90])]) == pytest.approx([0.1, 0.1])


def test_a_share_lies_between_those_of_the_rounds_drawn():
    yardstick, same, other = line("a", [100, 120]), line("same", [50, 60]), line("b", [80, 150])
    # Both rounds have the same share: whichever are drawn, it is that.
    assert same.share_between(yardstick) == pytest.approx((2, 2))
    assert share_text(same, yardstick) == "200.0% (200.0% – 200.0%)"
    # A quarter of all draws have the first round alone, a quarter the second one.
    assert other.share_between(yardstick) == pytest.approx((120 / 150, 100 / 80))


def test_a_single_round_says_nothing_of_what_lies_by_chance():
    assert line("b", [80]).share_between(line("a", [100])) is None
    assert share_text(line("b", [80]), line("a", [100])) == "125.0%"


def test_a_row_says_what_was_measured_beside_what_was_predicted():
    yardstick = line("a", [100, 110, 120], predicted_ms=[99, 110, 121])
    rows = throughput_table([yardstick, line("torch", [50, 55, 60]), line("b", [220], dead="W1_2")], yardstick)
    assert rows[0][6] == "of A"
    assert rows[1] == ["A", "nobody", "110.0", "110.0", "105 – 115", "490.9", "100.0%", "110.0", "+0.0%"]
    assert rows[2] == ["TORCH", "nobody", "55.0", "55.0", "52 – 58", "981.8", "200.0% (200.0% – 200.0%)", "–", "–"]
    assert rows[3][1:3] == ["W1_2", "220.0"]


def test_predictions_are_judged_by_their_median_and_their_worst():
    lines = [line("a", [100], predicted_ms=[102]), line("b", [100], predicted_ms=[91]), line("c", [100], predicted_ms=[101])]
    middle, worst = errors_asked([*lines, line("torch", [100])], 0.03, 0.08)
    assert (middle.found, middle.is_met) == ("2.0%", True)
    assert (worst.found, worst.is_met) == ("9.0%", False)
    assert asked_table([Asked("what", "≥ 1", "0", False)])[1] == ["what", "≥ 1", "0", "no"]


def test_times_have_a_median_and_a_worst_and_those_of_nothing_have_no_row():
    assert times_table({"kills": [1000.0, 3000.0, 2000.0], "joins": []})[1:] == [["kills", "3", "2", "3"]]


def test_the_picture_is_a_png_that_is_the_same_each_time():
    lines = [line("a", [100], predicted_ms=[102]), line("torch", [90]), line("b", [120], predicted_ms=[118], dead="W1_2")]
    drawn = draw_cluster(lines, lines[0], "12 workers")
    assert drawn.startswith(b"\x89PNG")
    assert drawn == draw_cluster(lines, lines[0], "12 workers")
