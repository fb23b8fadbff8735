"""The mean over seeds and its interval: against scipy, and by counting how often it holds the true mean."""

import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from recycle.sim.campaign.mean_interval import LEVEL, mean_interval, student_t


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 9, 10, 19, 30, 99, 1000])
@pytest.mark.parametrize("level", [0.5, 0.9, 0.99])
def test_student_t_is_that_of_scipy(degrees, level):
    assert student_t(degrees, level) == pytest.approx(stats.t.ppf(0.5 + level / 2, degrees), rel=1e-9)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_the_interval_is_that_of_scipy(values):
    found = mean_interval(values)
    assert found.mean == pytest.approx(fmean(values), rel=1e-9, abs=1e-6)
    error = stats.sem(values)
    wanted = stats.t.interval(0.9, len(values) - 1, loc=0, scale=error)[1] if error else 0.0
    assert found.half_width == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_nine_of_ten_intervals_hold_the_true_mean():
    draws = random.Random(1)
    hits = 0
    for _ in range(2000):
        mean, half_width = mean_interval([draws.gauss(5, 2) for _ in range(6)])
        hits += abs(mean - 5) <= half_width
    assert hits / 2000 == pytest.approx(LEVEL, abs=0.02)


def test_one_value_has_no_interval():
    found = mean_interval([0.5])
    assert found == (0.5, None)
    assert found.to_json() == {"mean": 0.5, "low": None, "high": None}
    assert mean_interval([1.0, 1.0]).to_json() == {"mean": 1.0, "low": 1.0, "high": 1.0}
