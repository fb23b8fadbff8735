"""The examples in the docstrings of the simulator's public functions run as written."""

import doctest

import pytest

from recycle.sim import job
from recycle.sim.campaign import campaign
from recycle.sim.replay import replay


@pytest.mark.parametrize(
    ("module", "fewest"), [(job, 2), (campaign, 6), (replay, 5)], ids=lambda given: getattr(given, "__name__", "")
)
def test_every_example_of_a_docstring_gives_what_it_says(module, fewest):
    found = doctest.testmod(module)
    assert found.failed == 0
    assert found.attempted >= fewest
