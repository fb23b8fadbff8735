"""When a worker that died is started again."""

from recycle.core.cluster import Worker
from recycle.runtime.launch.restart_policy import RestartPolicy

W0_0, W1_1 = Worker(0, 0), Worker(1, 1)


def test_each_death_of_a_place_doubles_the_pause_until_it_stays_dead() -> None:
    policy = RestartPolicy(3)
    assert [policy.pause_s(W0_0, now_s) for now_s in (0, 10, 20, 30)] == [1.0, 2.0, 4.0, None]
    assert policy.pause_s(W1_1, 40) == 1.0


def test_deaths_of_long_ago_are_forgotten() -> None:
    policy = RestartPolicy(1)
    assert [policy.pause_s(W0_0, now_s) for now_s in (0, 3599, 7000, 7199, 12000)] == [1.0, None, None, None, 1.0]


def test_none_is_restarted_if_none_is_to_be() -> None:
    assert RestartPolicy(0).pause_s(W0_0, 0) is None
