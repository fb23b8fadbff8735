"""Prices: what a run costs by the GPUs that one pays for, whether they compute, are idle, or are being repaired."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class PaidRun:
    """The throughput of a run, the GPUs that it was paid for, and what one of them costs an hour, None if that is not known.

    `tokens_per_sample` is 0 if samples are not of a known number of tokens; then samples count.
    """

    samples_per_s: float
    num_gpus: int
    tokens_per_sample: int = 0
    per_gpu_hour: float | None = None

    @property
    def unit(self) -> str:
        return "tokens" if self.tokens_per_sample else "samples"

    @property
    def per_gpu(self) -> float:
        """Tokens, or samples, of one of these GPUs in a second."""
        return per_paid_gpu(self.samples_per_s * (self.tokens_per_sample or 1), self.num_gpus)

    @property
    def cost(self) -> float | None:
        """The cost of a million tokens, or samples; None without a price or a throughput."""
        if self.per_gpu_hour is None:
            return None
        return cost_per_million(self.per_gpu, 1, self.per_gpu_hour)

    def to_json(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"gpus": self.num_gpus, f"{self.unit}_per_s_per_gpu": round(self.per_gpu, 6)}
        if self.per_gpu_hour is not None:
            facts[f"cost_per_million_{self.unit}"] = None if self.cost is None else round(self.cost, 6)
        return facts


def paid_table(runs: Mapping[str, PaidRun]) -> list[list[str]]:
    """Return the head and one row a system: paid GPUs, the throughput of one of them, and the cost if there is a price."""
    unit = next(iter(runs.values())).unit
    has_price = any(run.per_gpu_hour is not None for run in runs.values())
    head = ["system", "paid GPUs", f"{unit}/s each", *([f"cost of a million {unit}"] if has_price else [])]
    return [
        head,
        *([name, f"{run.num_gpus:,}", f"{run.per_gpu:,.4g}", *_cost_cell(run, has_price)] for name, run in runs.items()),
    ]


def _cost_cell(run: PaidRun, has_price: bool) -> list[str]:
    if not has_price:
        return []
    return ["–" if run.cost is None else f"{run.cost:,.4g}"]
