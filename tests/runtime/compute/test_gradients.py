"""Exact sums: what is done with contributions that do not fit, without a host that waits for its GPU."""

import pytest
import torch

from recycle.runtime.compute.gradients import below


@pytest.mark.parametrize("numbers", [[1.0, -2.0, 3.5], []])
@pytest.mark.parametrize("misfit", [None, 4.0, -7.0, float("nan"), float("inf"), float("-inf")])
def test_what_does_not_fit_is_left_out_and_noted(numbers, misfit):
    others = [] if misfit is None else [misfit]
    kept, has_others = below(torch.tensor([*numbers, *others], dtype=torch.float64), 4.0)
    assert kept.tolist() == [*numbers, *[0.0 for _ in others]]
    assert bool(has_others) == bool(others)
