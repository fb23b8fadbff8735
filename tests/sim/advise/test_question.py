"""The failures of a question: by a rate of servers, or by a failure model, the same for every shape."""

from dataclasses import replace

import pytest

from recycle.core.errors import UserError
from recycle.core.profile import Profile
from recycle.sim.advise.choices import all_choices
from recycle.sim.advise.question import DAY_US, to_plain
from recycle.sim.failure_model import parse_failure_model
from recycle.sim.measured_model import measured
from tests.sim.advise.small_cluster import small_question


def modelled(text, **changes):
    model = parse_failure_model(text)
    given = {"mtbf_us": model.mtbf_us(changes.get("gpus_per_server", 8)), "repair_us": model.mean_repair_us, "failures": model}
    return small_question(**{"gpus_per_server": 8, **given, **changes})


def test_servers_fail_as_often_as_the_model_says():
    # 6.5 failures in a thousand node-days: 12,800 of them have 83, and 9 more or fewer by chance.
    question = modelled("rsc1", num_gpus=1024, days=100.0)
    trace = question.trace(1, question.num_servers, 1)
    assert abs(trace.num_failures - 83.2) < 4 * 83.2**0.5
    assert question.mtbf_us == pytest.approx(1000 / 6.5 * DAY_US, rel=1e-6)
    twice = question.with_failures(2)
    assert abs(twice.trace(1, 128, 1).num_failures - 166.4) < 4 * 166.4**0.5
    assert twice.mtbf_us == question.mtbf_us // 2


def test_a_server_leaves_with_all_its_workers_whatever_failed():
    question = modelled("mtbf=100d", num_gpus=64, days=30.0)
    whole, parts = question.trace(1, 8, 1), question.trace(4, 4, 1, 2)
    assert whole.num_failures > 10
    assert parts.num_failures == 2 * whole.num_failures
    assert [change.at_us for change in parts.later[::2]] == [change.at_us for change in whole.later]
    # The workers of the server whose number is 3 are the sixth and seventh.
    fails = [change.at_us for change in whole.later if change.node == "W0_3"]
    assert fails == [change.at_us for change in parts.later if change.node == "W1_2"]
    assert fails == [change.at_us for change in parts.later if change.node == "W1_3"]


def test_a_rack_takes_all_its_servers_at_once():
    question = modelled("llama3,times=200,rack=32", num_gpus=64, days=30.0)
    trace = question.trace(1, 8, 1)
    together: dict[int, set[str]] = {}
    for change in trace.later:
        if not change.joins:
            together.setdefault(change.at_us, set()).add(change.node)
    racks = [{f"W0_{number}" for number in range(first, first + 4)} for first in (0, 4)]
    several = [nodes for nodes in together.values() if len(nodes) > 1]
    # A server of the rack that is away already does not leave once more.
    assert several
    assert all(nodes <= racks[0] or nodes <= racks[1] for nodes in several)
    assert any(nodes in racks for nodes in several)


def test_a_hang_of_the_model_is_in_the_trace():
    trace = modelled("llama3,times=500", num_gpus=64, days=30.0).trace(1, 8, 1)
    assert trace.num_hangs > 0


def test_longer_repairs_of_a_model_keep_its_failures_and_lengthen_absences():
    question = modelled("rsc2,times=4", num_gpus=512, days=60.0)
    longer = question.with_repairs(4)
    away, more = (sum(dead * share for dead, share in one.dead_shares.items()) for one in (question, longer))
    assert more > 2 * away
    assert longer.repair_us == 4 * question.repair_us
    assert longer.failures.mean_repair_us == pytest.approx(4 * question.failures.mean_repair_us)
    assert longer.failures.per_gpu_day == question.failures.per_gpu_day


def test_questions_with_other_failure_models_have_other_digests():
    question = modelled("rsc1")
    assert question.digest != replace(question, failures=parse_failure_model("rsc1,machine=16")).digest
    assert to_plain(question)["failures"]["causes"][0]["scope"] == "machine"


def test_a_measured_worker_is_one_device():
    made = Profile.uniform(2, 30_000, 30_000, 30_000).with_equal_layers(4)
    model, device = measured(made, 1 << 40)
    question = replace(small_question(), model=model, gpu=device)
    assert question.tensor_parallel_degrees == (1,)
    assert {choice.tensor_parallel for choice in all_choices(question)} == {1}
    # Neither more stages than layers, nor only as many as were measured.
    assert {choice.shape.num_stages for choice in all_choices(question)} == {1, 2, 3, 4}
    assert (question.unit, question.units_per_sample) == ("samples", 1)
    with pytest.raises(UserError, match="the context-parallel degree is 2, but a measured worker is one device"):
        replace(question, context_parallel=2)
