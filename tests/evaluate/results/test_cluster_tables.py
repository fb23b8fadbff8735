"""The tables and the chart of a measured cluster."""

from dataclasses import replace

import pytest

from recycle.evaluate.results.cluster_chart import cluster_figure, draw_cluster
from recycle.evaluate.results.cluster_tables import (
    BEFOREHAND,
    FULL,
    PREDICTION_STEPS,
    Requirement,
    VariantResult,
    error_requirements,
    errors_beforehand,
    errors_by_round,
    interquartile_mean,
    prediction_table,
    requirement_table,
    share_text,
    throughput_table,
    times_table,
)
from recycle.sim.replay.expected_iteration import ExpectedIteration


def line(name, times_ms, num_samples=54, predicted_ms=(), dead=""):
    times_us = {number: [took * 1e3] for number, took in enumerate(times_ms)}
    predictions = {
        number: ExpectedIteration(took * 1e3 - 30, took * 1e3 - 20, took * 1e3 - 10, took * 1e3)
        for number, took in enumerate(predicted_ms)
    }
    losses = {number: [4.0, 3.5] for number in times_us}
    return VariantResult(name, name.upper(), dead, times_us, num_samples, losses, predictions)


def test_the_interquartile_mean_is_the_mean_of_the_middle_half():
    assert interquartile_mean([5, 1, 2, 4, 3, 99, 6, -70]) == pytest.approx((2 + 3 + 4 + 5) / 4)
    # Where long and short iterations alternate it is near their mean, and a median is not.
    assert interquartile_mean([100, 110] * 8 + [100]) == pytest.approx(105, abs=1)
    assert interquartile_mean([7]) == 7
    assert line("a", [100, 100, 100, 900]).typical_us == 100e3


def test_a_share_is_a_ratio_of_interquartile_means():
    # The machine was three times as slow in the second round, for both variants.
    baseline, other = line("a", [100, 300, 100, 100]), line("b", [80, 240, 80, 80])
    assert other.share_of(baseline) == pytest.approx(100 / 80)
    assert baseline.share_of(baseline) == 1


def test_throughput_counts_samples():
    # As long an iteration, but of two thirds of the samples.
    small = line("small", [100], num_samples=36)
    assert small.share_of(line("a", [100])) == pytest.approx(2 / 3)
    assert small.samples_per_s == pytest.approx(360)


def test_an_error_is_the_median_prediction_relative_to_the_interquartile_mean():
    found = line("a", [100, 200, 200, 400], predicted_ms=[103, 206, 206, 300])
    assert found.predicted_us(FULL) == 206e3
    assert found.error(FULL) == pytest.approx(0.03)


def test_each_step_of_the_prediction_has_its_column_and_its_error():
    head, row = prediction_table([line("a", [100], predicted_ms=[101]), line("torch", [90])])
    assert head == ["variant", *PREDICTION_STEPS, BEFOREHAND, "measured ms"]
    assert row == ["A", "101.0 (+1.0%)", "101.0 (+1.0%)", "101.0 (+1.0%)", "101.0 (+1.0%)", "–", "100.0"]


def test_the_prediction_by_the_first_profile_has_a_column_of_its_own():
    known = replace(line("a", [100], predicted_ms=[101]), beforehand=ExpectedIteration(70e3, 80e3, 85e3, 94e3))
    assert prediction_table([known])[1][-2:] == ["94.0 (-6.0%)", "100.0"]
    assert errors_beforehand([known, line("torch", [90])]) == [pytest.approx(0.06)]


def test_errors_by_round_are_relative_to_each_rounds_own_time():
    # The median prediction is right; each round's own is not.
    assert errors_by_round([line("a", [100, 110], predicted_ms=[110, 99]), line("torch", [90])]) == pytest.approx([0.1, 0.1])


def test_the_bootstrap_interval_lies_between_the_shares_of_the_rounds():
    baseline, same, other = line("a", [100, 120]), line("same", [50, 60]), line("b", [80, 150])
    # Both rounds have the same share, and so has every resample.
    assert same.share_interval(baseline) == pytest.approx((2, 2))
    assert share_text(same, baseline) == "200.0% (200.0% – 200.0%)"
    # A quarter of all resamples have the first round only, a quarter the second one.
    assert other.share_interval(baseline) == pytest.approx((120 / 150, 100 / 80))


def test_a_single_round_has_no_bootstrap_interval():
    assert line("b", [80]).share_interval(line("a", [100])) is None
    assert share_text(line("b", [80]), line("a", [100])) == "125.0%"


def test_a_row_has_the_measured_and_the_predicted_time():
    baseline = line("a", [100, 110, 120], predicted_ms=[99, 110, 121])
    rows = throughput_table([baseline, line("torch", [50, 55, 60]), line("b", [220], dead="W1_2")], baseline)
    assert rows[0][6] == "of A"
    assert rows[1] == ["A", "nobody", "110.0", "110.0", "105 – 115", "490.9", "100.0%", "110.0", "+0.0%"]
    assert rows[2] == ["TORCH", "nobody", "55.0", "55.0", "52 – 58", "981.8", "200.0% (200.0% – 200.0%)", "–", "–"]
    assert rows[3][1:3] == ["W1_2", "220.0"]


def test_requirements_on_predictions_are_their_median_and_their_worst_error():
    lines = [line("a", [100], predicted_ms=[102]), line("b", [100], predicted_ms=[91]), line("c", [100], predicted_ms=[101])]
    middle, worst = error_requirements([*lines, line("torch", [100])], 0.03, 0.08)
    assert (middle.found, middle.is_met) == ("2.0%", True)
    assert (worst.found, worst.is_met) == ("9.0%", False)
    assert requirement_table([Requirement("what", "≥ 1", "0", False)])[1] == ["what", "≥ 1", "0", "no"]


def test_times_have_a_median_and_a_worst_and_empty_lists_have_no_row():
    assert times_table({"kills": [1000.0, 3000.0, 2000.0], "joins": []})[1:] == [["kills", "3", "2", "3"]]


def test_the_picture_is_a_png_that_is_the_same_each_time():
    lines = [line("a", [100], predicted_ms=[102]), line("torch", [90]), line("b", [120], predicted_ms=[118], dead="W1_2")]
    drawn = draw_cluster(lines, lines[0], "12 workers")
    assert drawn.startswith(b"\x89PNG")
    assert drawn == draw_cluster(lines, lines[0], "12 workers")


def test_the_legend_has_every_kind_of_bar_and_lies_inside_the_chart():
    dead = line("one dead in every stage", [120], predicted_ms=[118], dead="W0_0,W1_1,W2_2,W0_3")
    figure = cluster_figure([line("a", [100], predicted_ms=[102]), line("torch", [90]), dead], line("a", [100]), "12 workers")
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 4
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert box.y1 <= min(axes.get_tightbbox().y0 for axes in figure.axes)
