"""`seed_shares`: the throughput of a system over several seeds, and its shares of the fault-free rates, with their intervals."""

from collections.abc import Sequence

from recycle.sim.campaign.fault_free_rates import FaultFreeRates
from recycle.sim.campaign.mean_interval import MeanInterval, mean_interval


def seed_shares(system: str, throughputs: Sequence[float], rates: FaultFreeRates) -> dict[str, MeanInterval | None]:
    """Return mean and interval of the throughput, of its share of 1F1B, of its goodput, and of its share of the best schedule.

    The goodput is None if the system cannot run the job at all.
    """
    own = rates.own[system]
    references = {"throughput": 1.0, "one_f_one_b_share": rates.one_f_one_b, "goodput": own, "best_share": rates.best}
    return {
        name: mean_interval([throughput / rate for throughput in throughputs]) if rate else None
        for name, rate in references.items()
    }
