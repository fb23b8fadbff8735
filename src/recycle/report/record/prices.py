"""Prices: what a run costs by the GPUs that one pays for, whether they compute, are idle, or are being repaired."""

from recycle.core.errors import UserError

MOST_PER_HOUR = 1e6


def refuse_price(per_gpu_hour: float) -> None:
    """Raise if this is not a price of a GPU for an hour."""
    if not 0 < per_gpu_hour <= MOST_PER_HOUR:  # also refuses NaN
        raise UserError(f"a GPU costs {per_gpu_hour:g} an hour, but the price must be above 0 and at most {MOST_PER_HOUR:,.0f}")


def per_paid_gpu(throughput: float, num_paid_gpus: int) -> float:
    """The throughput of one of the GPUs that are paid for, spares among them."""
    return throughput / num_paid_gpus


def cost_per_million(throughput: float, num_paid_gpus: int, per_gpu_hour: float) -> float | None:
    """The cost of a million of what `throughput` counts a second, tokens or samples; None if nothing is done.

    Example:
        >>> cost_per_million(throughput=1_000_000, num_paid_gpus=64, per_gpu_hour=2.25)
        0.04
    """
    if throughput <= 0:
        return None
    return num_paid_gpus * per_gpu_hour / 3600 / throughput * 1e6
