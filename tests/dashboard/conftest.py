"""Fixtures of the tests in a browser."""

import pytest

from tests.dashboard.browser import started_browser


@pytest.fixture(scope="module")
def browser():
    with started_browser() as made:
        yield made


@pytest.fixture
def problems():
    """Errors of the page's scripts: a test that opens a page fails if there are any."""
    found = []
    yield found
    assert found == []
