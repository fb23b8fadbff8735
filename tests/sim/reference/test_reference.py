"""The reference simulator gives the published averages if their data is present, and results by hand on small traces."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from recycle.core.errors import UserError
from recycle.core.events.trace import Change, Trace
from tests.sim.reference.reference_policies import reference_average
from tests.sim.reference.reference_simulation import ALL_DEVIATIONS, NO_DEVIATIONS

DATA = Path(os.environ.get("RECYCLE_PEERS_DATA") or Path(__file__).parents[3].parent / "shared" / "data")
TRACES = ("6h", "3h", "1h", "30m", "10m", "scale_p3-trace")
MODELS = ("bert-large", "gpt-3-6.7b")
LIMITS = {"oobleck": 0.01, "varuna": 0.03, "bamboo": 0.03}
with_data = pytest.mark.skipif(
    not (DATA / "peers_reference.json").is_file(),
    reason=f"the public data of the reference is not at {DATA}: set RECYCLE_PEERS_DATA to the folder of peers_reference.json",
)

# Nodes come at 480 s, and some leave soon.
GCP = DATA / "traces" / "scale_gcp-trace.csv"
with_gcp = pytest.mark.skipif(
    not GCP.is_file(), reason=f"tools/simulator/traces/scaled/{GCP.name} of SymbioticLab/Oobleck is not at {GCP.parent}"
)


def public(name):
    return json.loads((DATA / "peers_reference.json").read_text(encoding="utf-8"))[name]


@with_data
def test_no_average_of_the_reference_is_left_out():
    cells = {
        (model, trace, system)
        for model, rows in public("average_samples_per_s").items()
        for trace in rows
        for system in rows[trace]
    }
    assert cells == {(model, trace, system) for model in MODELS for trace in TRACES for system in LIMITS}


@with_data
@pytest.mark.parametrize("system", LIMITS)
@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("model", MODELS)
def test_the_average_is_that_of_the_reference(model, name, system):
    wanted = public("average_samples_per_s")[model][name][system]
    table = public("throughput_by_nodes_30_to_15")[model].get(system, ())
    average = reference_average(system, model, table, Trace.load(DATA / "traces" / f"{name}.csv"))
    # Averages are given with three decimals.
    assert average == pytest.approx(wanted, rel=LIMITS[system], abs=0.0005)


@with_data
@with_gcp
@pytest.mark.parametrize(
    ("model", "wanted", "without_shift"),
    [pytest.param("gpt-3-2.7b", 0.915, 1.137, id="2.7B"), pytest.param("gpt-3-6.7b", 0.0, 0.029, id="6.7B")],
)
def test_checkpoints_of_varuna_that_are_torn_early_give_what_the_authors_simulator_gives(model, wanted, without_shift):
    table, trace = public("throughput_by_nodes_30_to_15")[model]["varuna"], Trace.load(GCP)
    assert reference_average("varuna", model, table, trace) == pytest.approx(wanted, abs=0.0005)
    in_place = replace(ALL_DEVIATIONS, torn_checkpoint_shifts=False)
    assert reference_average("varuna", model, table, trace, in_place) == pytest.approx(without_shift, abs=0.0005)


# From here on, traces and tables are made up. Nodes n0, n1, ... join at the start, and are ready at 45 s.


def leaves(num_nodes, *removals, end_s, apart_s=0):
    """A trace of so many nodes, each `apart_s` after the one before, and of removals (second, node)."""
    joins = [Change(n * apart_s * 1_000_000, True, f"n{n}") for n in range(num_nodes)]
    gone = [Change(round(at_s * 1_000_000), False, f"n{n}") for at_s, n in removals]
    return Trace((*joins, *gone), end_s * 1_000_000)


def table(**samples_per_s):
    """A table in which the nodes from `n24` on downwards have the value given for it, until the next one."""
    rows, value = [], 0.0
    for nodes in range(30, 14, -1):
        value = samples_per_s.get(f"n{nodes}", value)
        rows.append(value)
    return rows


# BERT-large: 8192 samples a step, a rendezvous of 2 s. 10 s a step with 24 nodes or more, 20 s with fewer.
BERT = table(n30=819.2, n23=409.6)
# GPT-2: 1024 samples a step, 10 s a step for any number of nodes.
GPT2 = table(n30=102.4)


def test_oobleck_loses_the_step_in_flight_and_goes_on_at_the_speed_of_the_nodes_left():
    # Ready 45, rendezvous to 47, steps end at 57 ... 97. Loss at 100, rendezvous to 102, steps end at 122, 142, 162, 182.
    # 9 steps from 47 to 182.
    trace = leaves(24, (100, 3), end_s=200)
    assert reference_average("oobleck", "bert-large", BERT, trace) == pytest.approx(9 * 8192 / 135)
    # The policy alone: the same steps, over all of the 200 s.
    assert reference_average("oobleck", "bert-large", BERT, trace, NO_DEVIATIONS) == pytest.approx(9 * 8192 / 200)


def test_a_step_that_ends_in_a_pause_counts_in_the_reference_alone():
    # Steps end at 57 ... 87, and at 97, inside the rendezvous from 96 to 98; then at 118, 138, 158, 178, 198.
    trace = leaves(24, (96, 3), end_s=200)
    assert reference_average("oobleck", "bert-large", BERT, trace) == pytest.approx(10 * 8192 / 151)
    assert reference_average("oobleck", "bert-large", BERT, trace, NO_DEVIATIONS) == pytest.approx(9 * 8192 / 200)


def test_a_second_removal_in_a_pause_stops_the_reference_for_good():
    # Five steps until 97. Meetings end at 102, which starts the job, and at 103, which finds nobody waiting.
    trace = leaves(24, (100, 3), (101, 4), end_s=200)
    assert reference_average("oobleck", "bert-large", BERT, trace) == pytest.approx(5 * 8192 / 50)
    # The policy alone: one rendezvous to 103, steps end at 123, 143, 163, 183.
    assert reference_average("oobleck", "bert-large", BERT, trace, NO_DEVIATIONS) == pytest.approx(9 * 8192 / 200)


def test_a_stopped_job_has_a_rendezvous_when_a_node_is_ready():
    # As above until 97 and stopped at 103. A node that joins at 80 is ready at 125; rendezvous to 127; 23 nodes: 147, 167, 187.
    before = leaves(24, (100, 3), (101, 4), end_s=200)
    late = [change for change in before.changes if change.at_us >= 80_000_000]
    early = [change for change in before.changes if change.at_us < 80_000_000]
    trace = Trace((*early, Change(80_000_000, True, "late"), *late), before.end_us)
    assert reference_average("oobleck", "bert-large", BERT, trace) == pytest.approx(8 * 8192 / 140)


def test_fewer_nodes_than_a_pipeline_takes_train_nothing():
    assert reference_average("oobleck", "bert-large", BERT, leaves(11, (300, 0), end_s=300)) == 0


def test_varuna_rolls_back_to_its_last_checkpoint():
    # Ready 45, restart less checkpoint 71.5: 116.5. Ten steps end at 126.5 ... 216.5, the checkpoint at 228; seven more at
    # 238 ... 298 are rolled back at 300. The job is back at 371.5; steps end at 381.5 and 391.5. 12 steps in 400 s.
    trace = leaves(24, (300, 3), end_s=400)
    assert reference_average("varuna", "gpt-2", GPT2, trace, NO_DEVIATIONS) == pytest.approx(12 * 1024 / 400)
    # The reference: steps go on in the pause. The one that ends at 308 is the first after the removal: a checkpoint, to 319.5.
    # 329.5 and 339.5 make twenty: a checkpoint, to 351. Then 361 and 371 before the pause ends, and the two after it.
    # 10 + 1 + 2 + 2 + 2 steps from 116.5 to 391.5.
    assert reference_average("varuna", "gpt-2", GPT2, trace) == pytest.approx(17 * 1024 / 275)


def test_a_checkpoint_that_a_removal_interrupts_loses_its_ten_steps():
    # The checkpoint from 216.5 to 228 is interrupted at 220. The job is back at 291.5: ten steps end at 301.5 ... 391.5.
    trace = leaves(24, (220, 3), end_s=400)
    assert reference_average("varuna", "gpt-2", GPT2, trace, NO_DEVIATIONS) == pytest.approx(10 * 1024 / 400)


def test_steps_that_were_rolled_back_bring_the_next_checkpoint_of_the_reference_nearer():
    # As above until 228. Seven more steps end at 238 ... 298, and are rolled back at 300. The job is back at 371.5. By the policy
    # ten steps end at 381.5 ... 471.5, and the checkpoint at 483; the next step would end at 493.
    trace = leaves(24, (300, 3), end_s=492)
    assert reference_average("varuna", "gpt-2", GPT2, trace, NO_DEVIATIONS) == pytest.approx((10 + 10) * 1024 / 492)
    # The reference has counted 17 steps: three more end at 401.5, the checkpoint at 413, and seven end at 423 ... 483.
    counts = replace(NO_DEVIATIONS, lost_steps_count=True)
    assert reference_average("varuna", "gpt-2", GPT2, trace, counts) == pytest.approx((10 + 3 + 7) * 1024 / 492)
    assert reference_average("varuna", "gpt-2", GPT2, trace.until(490_000_000), counts) == pytest.approx(20 * 1024 / 490)
    assert reference_average("varuna", "gpt-2", GPT2, trace.until(472_000_000), NO_DEVIATIONS) == pytest.approx(20 * 1024 / 472)
    assert reference_average("varuna", "gpt-2", GPT2, trace.until(472_000_000), counts) == pytest.approx(18 * 1024 / 472)


def test_the_reference_interrupts_a_checkpoint_within_twice_its_time():
    # Removal at 230, 2 s after the checkpoint. The job is back at 301.5: nine steps end at 311.5 ... 391.5.
    trace = leaves(24, (230, 3), end_s=400)
    assert reference_average("varuna", "gpt-2", GPT2, trace, NO_DEVIATIONS) == pytest.approx((10 + 9) * 1024 / 400)
    late = replace(NO_DEVIATIONS, late_checkpoint=True)
    assert reference_average("varuna", "gpt-2", GPT2, trace, late) == pytest.approx(9 * 1024 / 400)


def test_a_checkpoint_that_is_torn_before_ten_steps_shifts_the_rates_of_the_reference():
    # Steps end at 126.5 and 136.5, and are rolled back at 140. The job is back at 211.5; the third step ends at 221.5, and its
    # checkpoint is interrupted at 225. The job is back at 296.5: the fourth step ends at 306.5, 73.5 s after the end of the
    # interrupted checkpoint at 233. A checkpoint to 318, nine steps to 408, a checkpoint to 419.5, eight steps to 499.5.
    trace = leaves(25, (140, 3), (225, 4), end_s=500)
    after_removal = replace(NO_DEVIATIONS, checkpoint_after_removal=True)
    assert reference_average("varuna", "gpt-2", GPT2, trace, after_removal) == pytest.approx(18 * 1024 / 500)
    # Ten zeros replace the rates of three steps. So the 4th to 10th step count nothing, the 11th (10 s) counts at the rate of the
    # 4th (73.5 s), and the 12th to 21st at the rates of the 5th to 14th, 10 s each.
    shifted = replace(after_removal, torn_checkpoint_shifts=True)
    assert reference_average("varuna", "gpt-2", GPT2, trace, shifted) == pytest.approx((10 + 10 / 73.5) * 1024 / 500)


def test_bamboo_fails_over_within_the_step_and_rebalances_after_it():
    # Ready 45, rendezvous of 30 to 75; steps end at 85 and 95. Loss at 100: the 5 s left of the step take 7.5, so 107.5.
    # One of 23 holds two stages: more than 5 %, so a rebalance of 80 to 187.5. Steps end at 197.5 ... 247.5: nine in all.
    trace = leaves(24, (100, 3), end_s=250)
    assert reference_average("bamboo", "gpt-2", GPT2, trace) == pytest.approx(9 * 1024 / 172.5)
    assert reference_average("bamboo", "gpt-2", GPT2, trace, NO_DEVIATIONS) == pytest.approx(9 * 1024 / 250)


def test_a_worker_of_bamboo_that_took_over_is_a_fatal_loss():
    # Nodes are ready from 45 to 68, and take their stages in this order at 75. n4 takes over from n5 at 100, and is lost at 101:
    # a rendezvous of 30 to 131. Two steps before (85, 95) and six after (141 ... 191).
    trace = leaves(24, (100, 5), (101, 4), end_s=200, apart_s=1)
    assert reference_average("bamboo", "gpt-2", GPT2, trace, NO_DEVIATIONS) == pytest.approx(8 * 1024 / 200)
    # The reference trains on in the rendezvous: 107.5 and, 1.5 times as long, 122.5. Ten steps from 75 to 191.
    assert reference_average("bamboo", "gpt-2", GPT2, trace) == pytest.approx(10 * 1024 / 116)


def test_a_lost_spare_of_bamboo_slows_the_reference_alone():
    # n24 is spare and lost at 100. The policy: steps end at 85, 95 ... 195.
    trace = leaves(25, (100, 24), end_s=200, apart_s=1)
    assert reference_average("bamboo", "gpt-2", GPT2, trace, NO_DEVIATIONS) == pytest.approx(12 * 1024 / 200)
    # The reference: 85, 95, 107.5 and then every 15 s until 197.5.
    assert reference_average("bamboo", "gpt-2", GPT2, trace) == pytest.approx(9 * 1024 / 122.5)


def test_without_a_table_a_system_is_out_of_memory():
    assert reference_average("bamboo", "gpt-3-6.7b", (), leaves(24, end_s=100)) == 0


@pytest.mark.parametrize(("system", "model", "unknown"), [("torchft", "gpt-2", "'torchft'"), ("varuna", "gpt-5", "'gpt-5'")])
def test_what_the_reference_does_not_know_is_named(system, model, unknown):
    with pytest.raises(UserError, match=unknown):
        reference_average(system, model, GPT2, leaves(24, end_s=100))
