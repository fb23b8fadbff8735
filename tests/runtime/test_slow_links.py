"""Slow links between real processes: they are named with their factor, and late or slow workers never make a link look slow."""

import pytest

from recycle.core.events.record import LinkChanged, SpeedChanged
from tests.runtime.test_slow_workers import SLOW, named, run

pytestmark = pytest.mark.timeout(300)
LINK = "W1_0-W1_1"


def test_a_slow_link_is_named_with_its_factor_and_since_when() -> None:
    """All messages are delayed, so that the noise of a busy machine matters little; those of one link four times as long."""
    others = [f"slow-link W{pipeline}_0-W{pipeline}_1@1+20ms" for pipeline in (0, 1, 2)]
    seen = run(*others, f"slow-link {LINK}@6+60ms", steps=24, follows=False)
    first = seen.of(LinkChanged)[0]
    assert first.link == LINK
    assert first.speed == pytest.approx(0.25, abs=0.09)
    assert first.time_us == pytest.approx(80_000, rel=0.3)
    assert first.usual_us == pytest.approx(20_000, rel=0.6)
    assert 4 <= first.iteration <= 12  # the report of an iteration has the messages of the next one's warm-up
    assert {change.link for change in seen.of(LinkChanged)} == {LINK}


def test_a_link_that_is_itself_again_is_named_again() -> None:
    seen = run(f"slow-link {LINK}@3-14+30ms", steps=45, follows=False)
    changes = [change for change in seen.of(LinkChanged) if change.link == LINK]
    assert changes[0].speed < 0.4
    assert changes[-1].speed == 1


def test_neither_a_slow_worker_nor_a_busy_machine_is_taken_for_a_slow_link() -> None:
    seen = run(f"slow {SLOW}@3:x0.3", steps=40, follows=False)
    assert named(seen.of(SpeedChanged), SLOW)
    assert not seen.of(LinkChanged)
