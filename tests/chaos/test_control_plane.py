"""A sample of the schedules of the whole control plane; CI runs two thousand, `make chaos` a million."""

from pathlib import Path
from random import Random

import pytest

from recycle.control.decide.messages import Report
from recycle.control.decide.phases import CoordinatorPhase
from recycle.runtime.worker.worker_reports import WorkerFinished, report_to_json
from tests.chaos.control_plane.plane import ControlPlane
from tests.chaos.control_plane.schedules import EVENTS, run_schedule
from tests.chaos.control_plane.virtual import CLOCK, virtual
from tests.chaos.seeds import run_seeds

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("part", range(2))
def test_the_job_is_done_and_nothing_is_lost(part: int) -> None:
    happened, failed = run_seeds(run_schedule, 50 * part, 50)
    assert failed == [], f"replay with: python -m tests.chaos.control_plane --num 1 --first {failed[0]}"
    assert set(happened) == set(EVENTS)


def test_a_seed_replays_exactly() -> None:
    assert [run_schedule(seed) for seed in range(5)] == [run_schedule(seed) for seed in range(5)]


def test_a_worker_that_finished_in_an_epoch_before_has_not_finished_in_this_one(tmp_path: Path) -> None:
    """Another coordinator gets such reports again; the checkpoint of the last step may still be on its way."""
    with virtual():
        plane = CLOCK.plane = ControlPlane(Random(1), tmp_path)
        while sum(worker.trains for worker in plane.workers) < plane.shape.num_workers:
            if len(plane.workers) < plane.shape.num_workers:  # some have come for a place that is taken, and are gone
                plane.join()
            plane.act(1)
        assert plane.service is not None
        coordinator = plane.service._coordinator
        for epoch, phase in ((coordinator.epoch - 1, CoordinatorPhase.RUNNING), (coordinator.epoch, CoordinatorPhase.DONE)):
            for worker in plane.workers:
                assert worker.connection is not None
                assert worker.place is not None
                worker.num_reports += 1
                finished = WorkerFinished(worker.place, str(worker.place.stage), 1, 1, epoch)
                plane.service.receive(worker.connection, Report(worker.num_reports, report_to_json(finished), worker.origin))
            assert coordinator.phase is phase
