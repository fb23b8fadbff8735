"""A server harness for each test, which must leave no file and no thread behind."""

import threading
from collections.abc import Iterator

import pytest

from tests.control.net.endpoint_harness import LEASE_S, PATIENCE_S, FakeMember, ServerHarness, num_open
from tests.processes import depends_on_load, wait_for


@pytest.fixture
def harness() -> Iterator[ServerHarness]:
    """A server that has left nothing behind when it is closed."""
    before, threads = num_open(), threading.active_count()
    made = ServerHarness()
    yield made
    made.close()
    # Fewer than before is no leak: what an earlier test closed may end during this one.
    wait_for(
        lambda: num_open() <= before and threading.active_count() <= threads,
        PATIENCE_S,
        lambda: f"{num_open() - before} files and {threading.active_count() - threads} threads are left",
    )


@pytest.fixture
def member(harness: ServerHarness) -> Iterator[FakeMember]:
    """A member that is not disturbed by anything that a test does to the server."""
    fake = harness.member("W0_0")
    fake.echo_s()
    yield fake
    with depends_on_load():
        assert fake.echo_s() < LEASE_S / 2
    assert harness.callbacks.num_disconnected == 0
    assert fake.refusals.empty()
    fake.client.close()
    harness.callbacks.wait_for(lambda: harness.callbacks.num_disconnected == 1)
