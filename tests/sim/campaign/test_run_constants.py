"""Pauses of a real run: medians of its recoveries from failures, at the asked number of workers by the measured law."""

import pytest
from msgspec import structs

from recycle.core.errors import FileProblem
from recycle.core.events.record import Recovered, Started, Suspected
from recycle.core.events.record_file import write_record
from recycle.sim.campaign.run_constants import DEATH_TO_GO_MS, control_us, read_run_constants, run_constants
from recycle.sim.systems.constants import Constants
from tests.recovery_records import JOINED, LEFT


def recovery(number, **parts_us):
    at_us = 10_000_000 * (number + 1)
    return structs.replace(
        LEFT, at_us=at_us, end_us=at_us + sum(parts_us.values()), **{f"{part}_us": us for part, us in parts_us.items()}
    )


DEATHS = [
    recovery(0, detect=3000, abort=40_000, plan=0, regroup=90_000),
    recovery(1, detect=5000, abort=60_000, plan=1000, regroup=70_000),
    recovery(2, detect=4000, abort=50_000, plan=0, regroup=80_000),
]


def test_constants_are_medians_of_recoveries_from_failures():
    found = run_constants([Started("train", "a"), *DEATHS, JOINED])
    assert (found.num_recoveries, found.num_workers) == (3, 12)
    assert (found.detect_us, found.abort_us, found.plan_us, found.regroup_us) == (4000, 50_000, 0, 80_000)
    assert found.hang_us is None


def test_a_hang_is_no_detection_of_a_death():
    hang = structs.replace(recovery(5, detect=1_800_000, abort=50_000, plan=0, regroup=80_000), workers=("W0_1",))
    found = run_constants([*DEATHS, Suspected(hang.at_us + 1_700_000, "W0_1", "silent for 1.7 s"), hang])
    assert (found.detect_us, found.hang_us, found.num_recoveries) == (4000, 1_800_000, 4)


def test_the_law_goes_through_the_measured_points_and_grows():
    for num_workers, time_ms in DEATH_TO_GO_MS:
        assert control_us(num_workers) == pytest.approx(time_ms * 1000)
    times = [control_us(num) for num in (1, 2, 12, 16, 17, 100, 256, 1000, 2048, 2049, 4096, 16_384)]
    assert times == sorted(times)
    # Between 256 and 1,024 workers: 4 times as many take 483 / 107 times as long, so that twice as many take the root of that.
    assert control_us(512) == pytest.approx(107_000 * (483 / 107) ** 0.5)
    # Beyond the last point the last two go on: twice as many workers, 1431 / 483 times the time.
    assert control_us(4096) == pytest.approx(1_431_000 * 1431 / 483)


def test_regrouping_grows_by_what_the_coordinator_takes_longer():
    found = run_constants(DEATHS)
    assert found.regroup_at_us(12) == 80_000
    assert found.regroup_at_us(1024) == pytest.approx(80_000 + 483_000 - control_us(12), abs=1)
    assert run_constants([structs.replace(one, num_live=2047) for one in DEATHS]).regroup_at_us(4) == 0


def test_recycle_and_what_is_assumed_to_be_as_fast_get_the_measured_pauses():
    before = Constants.for_model(1e9)
    after = run_constants(DEATHS).applied(before, 1024)
    for costs in (after.recycle, after.odyssey, after.resihp):
        assert (costs.detect_us, costs.plan_us) == (4000, 0)
        assert costs.regroup_us == pytest.approx(550_567, abs=5000)
    assert after.recycle.abort_us == 50_000
    assert (after.elaswave.detect_us, after.elaswave.regroup_us) == (4000, before.elaswave.regroup_us)
    assert (after.varuna, after.oobleck, after.recycle.restart_us) == (before.varuna, before.oobleck, before.recycle.restart_us)


def test_a_folder_is_read_and_one_without_a_recovery_is_refused(tmp_path):
    with pytest.raises(FileProblem, match=r"is not the folder of a run: it has no record\.jsonl"):
        read_run_constants(tmp_path)
    write_record(tmp_path / "record.jsonl", [Started("train", "a"), JOINED])
    with pytest.raises(FileProblem, match="has no recovery from a failure, so that it measured no pauses"):
        read_run_constants(tmp_path)
    write_record(tmp_path / "record.jsonl", [Started("train", "a"), *DEATHS])
    assert read_run_constants(tmp_path).num_recoveries == 3


def test_a_recovery_whose_parts_nobody_knows_measures_nothing():
    unknown = Recovered(10, 20, 3, ("W0_0",), False, "the coordinator was replaced in this recovery", 4, num_live=11)
    assert run_constants([unknown]) is None
