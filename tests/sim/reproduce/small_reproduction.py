"""The experiments in small, so that what they print can be looked at in a second."""

import pytest

from recycle.core.cluster import Shape
from recycle.sim.reproduce import ablation, fail_slow, scale, thousand
from recycle.sim.reproduce import planning_time as planner
from recycle.sim.reproduce import throughput_table as table
from recycle.sim.reproduce.published_numbers import PublishedRow
from tests.sim.quick_plans import plan_quickly

ROW = PublishedRow(
    "gpt3-medium", 2, 2, 27.58, {"bamboo": (19.47, 18.98, 15.24), "oobleck": (27.26, 25.37, 19.47), "recycle": None}
)


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few workers, few micro-batches, one model, two seeds; everything in this process."""

    def here(function, given, tick=lambda done: None, num_processes=None):
        answers = [function(one) for one in given]
        tick(len(answers))
        return answers

    plan_quickly(monkeypatch)
    monkeypatch.setattr(table, "parallel_map", here)
    for module in (table, ablation):
        monkeypatch.setattr(module, "TABLE", (ROW,))
    monkeypatch.setattr(table, "NUM_MICROBATCHES", 8)
    monkeypatch.setattr(table, "NUM_SEEDS", 2)
    monkeypatch.setattr(ablation, "MOST_FAILURES", 2)
    for module in (scale, fail_slow):
        monkeypatch.setattr(module, "CLUSTERS", (scale.ScaleCluster("gpt3-medium", 64, 32, ((2, 4), (4, 2))),))
    monkeypatch.setattr(fail_slow, "DAYS", ((0, 0),))
    monkeypatch.setattr(fail_slow, "HOURS", 2)
    monkeypatch.setattr(fail_slow, "NUM_DRAWS", 1)
    monkeypatch.setattr(scale, "NUM_SEEDS", 3)
    monkeypatch.setattr(scale, "MONTH_MODEL", "gpt3-medium")
    monkeypatch.setattr(scale, "MONTH_SHAPE", Shape(2, 4, 4))
    monkeypatch.setattr(thousand, "MODEL", "gpt3-medium")
    monkeypatch.setattr(thousand, "SHAPE", Shape(3, 2, 4))
    monkeypatch.setattr(thousand, "NUM_SEEDS", 2)
    monkeypatch.setattr(thousand, "DAYS", 5)
    monkeypatch.setattr(thousand, "FAILURE_DAYS", 30)
    monkeypatch.setattr(planner, "SHAPES", (Shape(2, 2, 4), Shape(4, 1, 2)))
