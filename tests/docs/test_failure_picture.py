"""The picture of a failure: its blocks as read from a record, and the SVG read back as XML."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from failure_picture import LEFT_PX, PLOT_PX, WIDTH_PX, draw_failure
from failure_timeline import Failure, events_around, read_failure
from msgspec.structs import replace

from recycle.core.cluster import Shape, Worker
from recycle.core.errors import UserError
from recycle.core.events.record import Event, OpRan, Recovered
from recycle.core.events.record_file import read_record
from tests.recovery_records import REDO_US, recovery_record

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
SPACE = "{http://www.w3.org/2000/svg}"
DEAD = Worker(1, 1)


def real_record() -> list[Event]:
    """The record of a real run: the dead worker's ops of the attempt are missing, those of the others are marked as in vain."""
    events = recovery_record()
    death = next(event for event in events if isinstance(event, Recovered))
    recorded = []
    for event in events:
        if isinstance(event, OpRan) and event.iteration == death.iteration and event.start_us < death.at_us:
            if event.worker == str(DEAD):
                continue
            event = replace(event, is_in_vain=True)
        recorded.append(event)
    return recorded


@pytest.fixture(name="failure")
def fixture_failure() -> Failure:
    return read_failure(real_record())


def parse(failure: Failure) -> ElementTree.Element:
    return ElementTree.fromstring(draw_failure(failure))


def texts(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SPACE}text")]


def boxes(root: ElementTree.Element, look: str) -> list[ElementTree.Element]:
    return [box for box in root.iter(f"{SPACE}rect") if look in box.get("class", "").split()]


def test_a_failure_reaches_from_the_start_of_the_attempt_to_the_end_of_the_next_one(failure: Failure) -> None:
    ops = [event for event in real_record() if isinstance(event, OpRan) and event.iteration == 5]
    assert failure.extent == (min(op.start_us for op in ops), max(op.end_us for op in ops))
    assert failure.recovered.at_us - failure.extent[0] == REDO_US
    assert failure.shape == Shape(2, 2, 2)


def test_discarded_and_counted_blocks_are_distinguished(failure: Failure) -> None:
    at_us, end_us = failure.recovered.at_us, failure.recovered.end_us
    for one in failure.activities:
        assert all(block.start_us < at_us for block in one.discarded)
        assert all(block.start_us >= end_us for block in one.counted)
    assert sum(block.op is not None for one in failure.activities for block in one.counted) == 2 * 2 * 2 * 3


def test_the_dead_worker_does_nothing_afterwards_and_its_peer_takes_over(failure: Failure) -> None:
    assert failure.dead == {DEAD}
    assert failure.emptied == {DEAD}
    assert failure.takers(DEAD) == (Worker(0, 1),)
    assert next(one for one in failure.activities if one.worker == DEAD).counted == ()


def test_the_events_around_a_failure_draw_the_same_picture_and_begin_at_zero() -> None:
    whole = real_record()
    kept = events_around(whole, next(event for event in whole if isinstance(event, Recovered)))
    assert len(kept) < len(whole) / 2
    assert read_failure(kept).extent[0] == 0
    assert draw_failure(read_failure(kept)) == draw_failure(read_failure(whole))


def test_joins_are_no_failures() -> None:
    with pytest.raises(UserError, match="the record holds 1 failures, so there is no number 1 to draw"):
        read_failure(real_record(), 1)


def test_a_record_that_ends_in_the_pause_is_refused() -> None:
    events = real_record()
    cut = events[: 1 + next(place for place, event in enumerate(events) if isinstance(event, Recovered))]
    with pytest.raises(UserError, match="the record ends before step 6 was done again"):
        read_failure(cut)


def test_the_picture_names_the_dead_worker_the_step_and_the_length_of_the_pause(failure: Failure) -> None:
    shown = texts(parse(failure))
    assert "W1_1 dies in step 6; 136 ms later the other 3 train on" in shown
    assert "paused 136 ms" in shown
    assert "W0_1 runs its micro-batches" in shown
    assert any("lost in all 156 ms, of them 20 ms of work that is done again" in text for text in shown)


def test_every_part_of_the_pause_has_its_milliseconds_and_a_bar_of_that_length(failure: Failure) -> None:
    root = parse(failure)
    assert {"detect 3.0 ms", "abort 41 ms", "plan 0 ms", "regroup 92 ms", "transfer 0 ms"} <= set(texts(root))
    bars = [box for box in boxes(root, "slot") if "tone-" in box.get("class", "")]
    widths = [float(bar.get("width", 0)) for bar in bars]
    assert [widths[0], widths[1], widths[3]] == pytest.approx([PLOT_PX * ms / 136 for ms in (3, 41, 92)], abs=0.01)


def test_the_row_of_the_dead_worker_ends_where_it_died(failure: Failure) -> None:
    root = parse(failure)
    lane = next(float(text.get("y", 0)) for text in root.iter(f"{SPACE}text") if text.text == "W1_1") - 13
    first, last = failure.extent
    died = LEFT_PX + PLOT_PX * (failure.recovered.at_us - first) / (last - first)
    ends = [
        float(box.get("x", 0)) + float(box.get("width", 0)) for box in root.iter(f"{SPACE}rect") if box.get("y") == f"{lane:.1f}"
    ]
    assert ends
    assert max(ends) == pytest.approx(died, abs=0.01)


def test_an_emptied_place_shows_where_its_worker_moved() -> None:
    moved: list[Event] = []
    for event in real_record():
        if isinstance(event, Recovered) and not event.joins:
            event = replace(event, moves=("W0_1>W1_1",))
        if isinstance(event, OpRan) and event.worker == "W0_1" and event.iteration == 5 and not event.is_in_vain:
            event = replace(event, worker="W1_1")
        moved.append(event)
    failure = read_failure(moved)
    assert failure.dead == {DEAD}
    assert failure.emptied == {Worker(0, 1)}
    shown = texts(parse(failure))
    assert "moved to W1_1: W1_1 runs its micro-batches" in shown
    assert "moved workers copy" in " ".join(shown)


def test_micro_batches_that_peers_took_over_are_striped_and_only_after_the_pause(failure: Failure) -> None:
    striped = [box for box in boxes(parse(failure), "slot") if box.get("class", "").endswith("-rerouted")]
    assert len(striped) == 2 * 3
    first, last = failure.extent
    begun = LEFT_PX + PLOT_PX * (failure.recovered.end_us - first) / (last - first)
    assert all(float(box.get("x", 0)) >= begun for box in striped)


def test_nothing_is_drawn_outside_the_picture(failure: Failure) -> None:
    root = parse(failure)
    height = float(root.get("height", 0))
    for box in root.iter(f"{SPACE}rect"):
        if box.get("x") is not None:
            assert 0 <= float(box.get("x", 0)) <= float(box.get("x", 0)) + float(box.get("width", 0)) <= WIDTH_PX
    assert all(0 < float(text.get("y", 0)) < height for text in root.iter(f"{SPACE}text"))


def test_the_picture_in_the_documents_is_the_one_of_the_record_beside_it() -> None:
    drawn = draw_failure(read_failure(read_record(PICTURES / "failure.jsonl")))
    assert (PICTURES / "failure.svg").read_text(encoding="utf-8") == drawn, "run 'make pictures'"


def test_the_documents_show_twelve_workers_of_which_one_dies() -> None:
    failure = read_failure(read_record(PICTURES / "failure.jsonl"))
    assert failure.shape == Shape(3, 4, 6)
    assert failure.recovered.workers == ("W1_2",)
    assert failure.takers(Worker(1, 2)) == (Worker(0, 2), Worker(2, 2))
    assert sum(block.op is not None for one in failure.activities for block in one.discarded) == failure.recovered.redone_ops
