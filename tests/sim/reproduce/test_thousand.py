"""The 1,024-GPU question: points of scheduling and of fault handling add up, and the sentences say what the numbers say."""

import pytest

from recycle.sim.campaign.fault_free_rates import FaultFreeRates
from recycle.sim.reproduce import thousand
from recycle.sim.systems.registry import SYSTEMS
from tests.sim.reproduce.small_reproduction import shrink

RATES = FaultFreeRates(
    10.0, 12.5, "oobleck-zb", {"recycle": 12.0, thousand.SHARING: 12.4, **dict.fromkeys(thousand.COMPARED, 12.0)}
)


def answer(*throughputs, own=12.0):
    return thousand.Answer(throughputs, own, 10.0)


def test_scheduling_and_faults_are_points_of_1f1b_and_add_up_to_the_share():
    found = answer(11.7, 11.9)
    assert found.scheduling == pytest.approx(20)
    assert found.faults.mean == pytest.approx(-2)  # 11.8 of 12, over 10
    assert 100 + found.scheduling + found.faults.mean == pytest.approx(118)
    assert found.goodputs == pytest.approx((97.5, 99.1667), abs=1e-3)


def test_the_sentences_tell_scheduling_from_fault_handling():
    answers = {
        "recycle": answer(11.7, 11.9),
        thousand.SHARING: answer(12.152, 12.152, own=12.4),
        **{name: answer(11.4, 11.6) for name in thousand.COMPARED},
        "fault-scaled": answer(9.9, 9.9, own=10.0),
        "ideal": answer(13.0, 13.0, own=13.5),
    }
    first, second, third, last = thousand.sentences("a failure a day", answers, RATES)
    # Student's t for two seeds is 6.31; half of the interval is that times half of the difference.
    assert "ReCycle is at 118.0 % of fault-free 1F1B: +20.0 points are its zero-bubble schedule" in first
    assert "and -2.0 ± 6.3 points are what failures cost" in first
    assert "98.3 ± 5.3 % of its own fault-free throughput, and 94.4 ± 5.1 % of the best fault-free schedule (oobleck-zb)" in first
    # Every seed has the same difference, so that its interval is narrow although the seeds differ.
    assert second.count("95.8 ± 5.3 % of its own (+2.5 ± 0.0 points for ReCycle)") == 3
    assert third == (
        "Scheduling leaves ReCycle 4.0 % below the best schedule with nobody dead. With one shared layer that is 0.8 %, and its "
        "share of the best schedule 97.2 ± 0.0 %, at 98.0 ± 0.0 % of its own."
    )
    # Nobody can run the ideal.
    assert last.startswith(
        f"Both together: {thousand.SHARING} trains most samples, 121.5 ± 0.0 % of fault-free 1F1B. 99.0 ± 0.0 %"
    )


def test_a_small_cluster_has_a_row_for_every_system_at_both_rates(monkeypatch, tmp_path):
    shrink(monkeypatch)
    ticks = []
    result = thousand.run_thousand(tmp_path, ticks.append)
    assert ticks[-1] == 2 * 2 * (len(SYSTEMS) + 1)
    assert len(result.answer) == 8
    for table in result.tables:
        assert len({len(row) for row in table.rows}) == 1
        names = [row[0].removesuffix(" (bound)") for row in table.rows[1:]]
        assert names == ["recycle", thousand.SHARING, *(name for name in SYSTEMS if name != "recycle")]
    often, seldom = (result.facts[rate] for rate in thousand.GPUS_OF_RATE)
    for name, facts in often.items():
        if facts["goodput"] is None:
            continue
        whole = 100 + facts["scheduling_points"] + facts["fault_points"]["mean"]
        assert whole == pytest.approx(100 * facts["one_f_one_b_share"]["mean"], abs=1e-3), name
        assert len(facts["throughputs"]) == 2
    assert often["fault-scaled"]["scheduling_points"] == often["replica-drop"]["scheduling_points"] == 0
    # Eight times as many failures cost more.
    for name in ("fault-scaled", "replica-drop", "replica-drop-zb", "ideal"):
        assert often[name]["fault_points"]["mean"] < seldom[name]["fault_points"]["mean"] <= 0
    assert thousand.run_thousand(tmp_path) == result
