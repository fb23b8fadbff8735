"""Costs of Oobleck, Varuna and Bamboo for five models, as the Oobleck authors' public simulator has them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublishedCosts:
    """Samples of a step, and pauses in ms. `restart_ms` of Varuna includes a checkpoint."""

    samples: int
    reconfigure_ms: int
    rebalance_ms: int
    checkpoint_ms: int
    restart_ms: int


COSTS = {
    "bert-large": PublishedCosts(8192, 2_000, 76_000, 15_800, 76_000),
    "gpt-2": PublishedCosts(1024, 2_000, 80_000, 11_500, 83_000),
    "gpt-3-medium": PublishedCosts(819, 3_000, 100_000, 11_200, 78_700),
    "gpt-3-2.7b": PublishedCosts(512, 6_000, 230_000, 50_000, 515_000),
    "gpt-3-6.7b": PublishedCosts(1024, 10_000, 450_000, 120_000, 701_000),
}
