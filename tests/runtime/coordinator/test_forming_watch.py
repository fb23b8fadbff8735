"""Before the first epoch: the job says whom it waits for, and does not wait for ever for workers that it has started itself."""

from recycle.control.decide.members import Member
from recycle.core.cluster import Worker
from recycle.runtime.coordinator.forming_watch import FormingWatch

PLACES = [Worker(0, 0), Worker(0, 1), Worker(1, 0), Worker(1, 1)]


def joined(*places: Worker | None) -> list[Member]:
    return [Member(number, number, "here", 7, place, 0.0) for number, place in enumerate(places)]


def test_it_says_who_is_missing_after_half_a_minute_and_then_ever_more_rarely() -> None:
    said: list[str] = []
    watch = FormingWatch(PLACES, 100.0, said.append, None)
    for second in range(100, 1000):
        watch.tick(second, joined(Worker(0, 0), Worker(1, 1)))
    sentence = "training has not begun: 2 of 4 workers have joined after {} s, and the others have not: W0_1, W1_0"
    assert said == [sentence.format(seconds) for seconds in (30, 60, 120, 240, 480)]


def test_it_names_nobody_if_workers_come_for_any_place() -> None:
    said: list[str] = []
    watch = FormingWatch(PLACES, 0.0, said.append, None)
    for second in range(40):
        watch.tick(second, joined(None, Worker(1, 1)))
    assert said == ["training has not begun: 2 of 4 workers have joined after 30 s, and the others have not"]


def test_it_says_nothing_once_all_are_there() -> None:
    said: list[str] = []
    watch = FormingWatch(PLACES, 0.0, said.append, said.append)
    for second in range(1000):
        watch.tick(second, joined(*PLACES))
    assert said == []


def test_time_in_which_the_coordinator_stood_still_does_not_count() -> None:
    said: list[str] = []
    FormingWatch(PLACES, 0.0, said.append, said.append).tick(5000.0, joined())
    assert said == []


def test_a_job_whose_own_workers_have_not_joined_after_ten_minutes_ends() -> None:
    said: list[str] = []
    ended: list[str] = []
    watch = FormingWatch(PLACES, 0.0, said.append, ended.append)
    for second in range(1000):
        watch.tick(second, joined(*PLACES[:3]))
    assert len(said) == 5
    assert ended == [
        "3 of 4 workers have joined after 600 s, and the others have not: W1_1; look for what holds up their processes"
    ]
