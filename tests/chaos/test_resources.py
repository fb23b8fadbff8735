"""A sample of the faults of resources; `make chaos` runs all of them."""

import pytest

from tests.chaos.resources import FAULTS, run_fault, twin

pytestmark = pytest.mark.timeout(120)
STEPS = 40
SAMPLE = ("no more descriptors: launcher, a worker killed",)


@pytest.fixture(scope="module")
def weights():
    return twin(STEPS)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name in SAMPLE], ids=lambda fault: fault.name)
def test_the_weights_are_those_of_the_twin(fault, weights):
    if refusal := fault.refusal():
        pytest.skip(refusal)
    outcome = run_fault(fault, weights, STEPS)
    assert not outcome.has_failed, outcome.detail
    assert outcome.num_recoveries >= bool(fault.also_kills)
