"""Prices: what a million tokens cost, by all GPUs that one pays for."""

import pytest

from recycle.core.errors import UserError
from recycle.report.record.prices import cost_per_million, per_paid_gpu, refuse_price


def test_a_million_tokens_cost_what_all_paid_gpus_cost_meanwhile():
    # 1,024 GPUs at 3 an hour cost 3,072 an hour; 20 million tokens a second are 72,000 million an hour.
    assert cost_per_million(20_000_000, 1024, 3.0) == pytest.approx(3072 / 72_000)


def test_spares_make_tokens_dearer_and_a_paid_gpu_slower():
    assert cost_per_million(100.0, 72, 2.0) == pytest.approx(cost_per_million(100.0, 64, 2.0) * 72 / 64)
    assert per_paid_gpu(144.0, 72) == 2.0


def test_a_run_that_does_nothing_has_no_cost_per_token():
    assert cost_per_million(0.0, 64, 2.0) is None


@pytest.mark.parametrize("price", [0.0, -1.0, float("nan"), 1e7])
def test_a_price_is_a_number_above_zero(price):
    with pytest.raises(UserError, match="must be above 0"):
        refuse_price(price)
