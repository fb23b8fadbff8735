"""A port of its own for each test, which must leave nothing behind."""

import threading
import time
from collections.abc import Iterator

import pytest

from tests.control.net.endpoint_harness import LEASE_S, PATIENCE_S, Guest, Post, num_open


@pytest.fixture
def post() -> Iterator[Post]:
    """A port that has left nothing behind when it is closed."""
    before, threads = num_open(), threading.active_count()
    made = Post()
    yield made
    made.close()
    deadline_s = time.monotonic() + PATIENCE_S
    while (num_open(), threading.active_count()) != (before, threads):
        assert time.monotonic() < deadline_s, (
            f"{num_open() - before} files and {threading.active_count() - threads} threads are left"
        )
        time.sleep(0.01)


@pytest.fixture
def member(post: Post) -> Iterator[Guest]:
    """Somebody who has been let in, and notices nothing of whatever a test does to the port."""
    guest = post.member("W0_0")
    guest.echo_s()
    yield guest
    assert guest.echo_s() < LEASE_S / 2
    assert post.porter.num_lost == 0
    assert guest.refusals.empty()
    guest.client.close()
    post.porter.wait_for(lambda: post.porter.num_lost == 1)
