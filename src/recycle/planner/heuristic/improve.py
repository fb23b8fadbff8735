"""Improvement: how the greedy method changes a good setting in the hope of a better one."""

import numpy as np

from recycle.planner.heuristic import list_scheduling_kernel as kernel
from recycle.planner.heuristic.search import Found, Search, Setting
from recycle.planner.model.schedule import Bools, Ints


def changed(rng: np.random.Generator, search: Search, best: Found) -> Setting:
    """A setting near the best one: other ops urgent, or a dial turned."""
    if rng.random() < 0.3:
        return Setting(best.setting.dials, _urgent_by_slack(rng, search, best))
    return Setting(_turn_a_dial(rng, best.setting.dials), best.setting.is_urgent)


def _turn_a_dial(rng: np.random.Generator, dials: Ints) -> Ints:
    """Return dials that differ in one column over a run of stages."""
    changed = dials.copy()
    num_stages = len(dials)
    first = int(rng.integers(num_stages))
    last = min(num_stages, first + 1 + int(rng.integers(max(1, num_stages // 2))))
    dial = int(rng.choice([kernel.PUSH, kernel.PUSH, kernel.STASH, kernel.HOLD, kernel.PATIENCE_US]))
    step = int(rng.choice([-4, -2, -1, 1, 2, 4]))
    changed[first:last, dial] = np.maximum(0, changed[first:last, dial] + step)
    return changed


def _urgent_by_slack(rng: np.random.Generator, search: Search, found: Found) -> Bools:
    """Return as urgent what a found schedule shows to be critical: the ops with the least slack."""
    slack = search.slack(found)
    is_urgent = slack <= int(rng.integers(0, 1 + int(search.costs[:, : kernel.WEIGHT_US + 1].sum(axis=1).max())))
    is_urgent[kernel.W] = False
    result: Bools = is_urgent
    return result
