"""The mean time between failures of a run."""

from recycle.control.planning.failure_times import FailureTimes


def test_one_failure_says_nothing_and_two_give_a_mean_since_the_beginning() -> None:
    times = FailureTimes(1_000_000)
    assert times.mean_us is None
    times.add(5_000_000, 1)
    assert times.mean_us is None
    times.add(9_000_000, 0)  # nobody failed
    assert times.mean_us is None
    times.add(21_000_000, 3)
    assert times.mean_us == 5_000_000


def test_it_has_two_digits_so_that_plans_made_ahead_stay_of_use() -> None:
    times = FailureTimes(0)
    times.add(24_690_000, 2)
    assert times.mean_us == 12_000_000
    times.add(24_690_000, 1_000_000_000)
    assert times.mean_us == 1
