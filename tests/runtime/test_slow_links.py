"""Slow links between real processes: they are named with their factor, and late or slow workers never make a link look slow."""

from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch

from recycle.core.cluster import Shape
from recycle.core.errors import UserError
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.core.events.record import LinkChanged, Placed, Recovered, SpeedChanged, Stepped
from recycle.runtime.options import FailureOptions, TrainOptions
from tests.processes import depends_on_load
from tests.runtime.test_slow_workers import SLOW, named, run

pytestmark = pytest.mark.timeout(300)
LINK = "W1_0-W1_1"


def test_a_slow_link_is_named_with_its_factor_and_since_when() -> None:
    """All messages are delayed, so that the noise of a busy machine matters little; those of one link by nine times as much."""
    others = [f"slow-link W{pipeline}_0-W{pipeline}_1@1+20ms" for pipeline in (0, 1, 2)]
    seen = run(*others, f"slow-link {LINK}@6+160ms", steps=24, follows=False)
    first = seen.of(LinkChanged)[0]
    with depends_on_load():
        assert first.link == LINK
        assert 0.08 < first.speed < 0.4  # 1 / 9 on an idle machine; no message comes early, and on a busy one some come late
        assert 175_000 < first.time_us < 280_000
        assert 19_000 < first.usual_us < 80_000
        assert 4 <= first.iteration <= 18  # the report of an iteration has the messages of the next one's warm-up
        assert {change.link for change in seen.of(LinkChanged)} == {LINK}


@pytest.mark.slow
def test_a_link_that_is_itself_again_is_named_again() -> None:
    """The delay is long, so that it stands out from the messages of a busy machine, and there is time to see its end."""
    seen = run(f"slow-link {LINK}@3-18+80ms", steps=50, follows=False)
    changes = [change for change in seen.of(LinkChanged) if change.link == LINK]
    with depends_on_load():
        assert changes[0].speed < 0.4
        assert changes[-1].speed == 1


@pytest.mark.slow
def test_neither_a_slow_worker_nor_a_busy_machine_is_taken_for_a_slow_link() -> None:
    seen = run(f"slow {SLOW}@3:x0.3", steps=40, follows=False)
    with depends_on_load():
        assert named(seen.of(SpeedChanged), SLOW)
        assert not seen.of(LinkChanged)


def test_peers_exchange_their_places_and_messages_go_around_a_slow_link(tmp_path: Path) -> None:
    """The delay is that between two processes, wherever they are. Weights stay the same, and iterations get short again."""
    seen = run(f"slow-link {LINK}@5+80ms", steps=36, out=tmp_path)
    change = next(event for event in seen.of(Recovered) if not event.workers)
    assert change.cause.startswith(f"the link {LINK} is slow, and messages go around it: ")
    pids = [[event.pid for event in seen.of(Placed) if event.node == end] for end in LINK.split("-")]
    assert sorted(len(each) for each in pids) == [1, 2]  # one end stays, and the other has another place
    assert change.moves == ()  # no state was copied
    assert change.redone_ops == 0
    ends_us = [event.at_us for event in seen.of(Stepped)]
    took_us = [after - before for before, after in pairwise(ends_us)]
    slow_us, around_us = median(took_us[6 : change.iteration - 1]), median(took_us[change.iteration + 1 :])
    with depends_on_load():
        assert around_us < slow_us - 40_000
    assert seen.trained is not None
    assert not seen.trained.dead


@pytest.mark.slow
def test_a_worker_that_dies_while_a_link_is_slow_is_replaced_around_it() -> None:
    seen = run(f"slow-link {LINK}@3+80ms", "kill W0_0@22", steps=30)
    (death,) = [event for event in seen.of(Recovered) if event.workers]
    assert death.iteration == 21
    assert death.workers in (("W0_0",), ("W1_0",), ("W2_0",))  # the process that began as W0_0 may have another place by then


def test_a_slow_link_is_refused_where_messages_cannot_be_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    script = Script.of([Injection.parse(Action.SLOW_LINK, "W1_0-W1_1@2+20ms")], Shape(2, 2, 2), 9)
    failures = FailureOptions(script=script)
    assert TrainOptions(device="cuda", transport="gloo", failures=failures).failures == failures
    with pytest.raises(UserError, match="only messages over gloo can be delayed: leave out --slow-link, or set the transport"):
        TrainOptions(device="cuda", failures=failures)
