"""Elastic cuts in the simulator: layers of estimated models, where dead workers are placed, how many layers are shared."""

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.core.cluster import Shape, Worker
from recycle.core.events.trace import Trace
from recycle.core.layer_sums import LayerSums
from recycle.planner.dead_placement import least_time_us, spread_failures
from recycle.planner.failure_normalization import normalized_problem
from recycle.planner.model.load_split import work_line
from recycle.planner.profiles.estimate import layer_costs
from recycle.sim.iteration_times import IterationTimes
from recycle.sim.job import SimulatedJob
from recycle.sim.model_layers import spread_layers
from recycle.sim.policy import Members, MembershipChange
from recycle.sim.shared_layer_choice import expected_dead, shared_layers_of_job
from recycle.sim.systems.constants import Constants, RecycleConstants
from recycle.sim.systems.recycle import Recycle
from recycle.sim.systems.registry import SYSTEMS, SystemContext
from tests.sim.quick_plans import plan_quickly

SHAPE = Shape(4, 4, 16)
JOB = SimulatedJob.of("layers=16,hidden=2048,heads=16,sequence=2048,vocabulary=1,microbatch=4", "a100-80", SHAPE)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    plan_quickly(monkeypatch)


def test_layers_have_the_costs_of_the_estimate():
    """Each layer costs what `layer_costs` says; the first one has the embedding, the last one the head."""
    job = SimulatedJob.of("layers=16,hidden=1024,heads=16,sequence=1024,vocabulary=32000", "a100-80", SHAPE)
    sums = LayerSums(job.problem(shared_layers=1).profile)
    embedding, layer, *_, head = layer_costs(job.model, job.gpu)
    wanted = [layer.forward_us] * 16
    wanted[0] += embedding.forward_us
    wanted[-1] += head.forward_us
    found = [sums.total("forward_us", range(at, at + 1)) for at in range(16)]
    assert found == pytest.approx(wanted, abs=2)
    bytes_of = [sums.total("static_bytes", range(at, at + 1)) for at in range(16)]
    parameters = [layer.num_parameters] * 16
    parameters[0] += embedding.num_parameters
    parameters[-1] += head.num_parameters
    assert bytes_of == pytest.approx([18 * each for each in parameters], rel=0.001)


@given(st.integers(1, 8), st.integers(0, 20), st.sampled_from([1, 50_000]))
def test_spread_layers_are_all_layers_and_no_stage_is_empty(num_stages, more, vocabulary):
    model = f"layers={num_stages + more},hidden=512,heads=8,sequence=512,vocabulary={vocabulary}"
    job = SimulatedJob.of(model, "a100-80", Shape(2, num_stages, 4))
    layers = spread_layers(job.model, job.gpu, num_stages, 1)
    assert len(layers) == num_stages
    assert sum(layers) == num_stages + more
    assert min(layers) >= 1


def test_stages_with_a_layer_more_are_spread_over_the_pipeline():
    job = SimulatedJob.of("layers=20,hidden=512,heads=8,sequence=512,vocabulary=1", "a100-80", Shape(2, 16, 4))
    layers = spread_layers(job.model, job.gpu, 16, 1)
    larger = [stage for stage, num in enumerate(layers) if num == 2]
    assert sorted(layers) == [1] * 12 + [2] * 4
    assert all(3 <= after - before <= 5 for before, after in pairwise(larger))


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 4), st.integers(3, 5), st.integers(1, 4), st.integers(1, 2))
def test_dead_workers_are_placed_nearly_as_well_as_brute_force(num_pipelines, num_stages, num_dead, num_shared):
    model = "layers=15,hidden=512,heads=8,sequence=512,vocabulary=1"
    job = SimulatedJob.of(model, "a100-80", Shape(num_pipelines, num_stages, 4))
    problem = job.problem(shared_layers=num_shared)
    num_dead = min(num_dead, num_stages * (num_pipelines - 1))
    places = [p for p in product(range(num_pipelines), repeat=num_stages) if sum(p) == num_dead]

    def time_us(place):
        return least_time_us(work_line(normalized_problem(problem, place)))

    found = spread_failures(problem, num_dead)
    assert sum(found) == num_dead
    assert max(found) < num_pipelines
    assert time_us(found) <= 1.05 * min(map(time_us, places))


def test_cuts_keep_nearly_the_live_share_where_re_routing_loses_a_quarter():
    cuts, rerouting = (IterationTimes(JOB.problem(shared_layers=shared)) for shared in (2, 0))
    kept = {times: times.fault_free().period_us / times.normalized(1).period_us for times in (cuts, rerouting)}
    assert kept[rerouting] == pytest.approx(3 / 4, abs=0.05)
    assert kept[cuts] > 0.9  # 15 of 16 workers are 0.9375


def test_a_failure_with_cuts_copies_nothing_and_a_moved_worker_copies_all_layers_that_it_holds():
    problem = JOB.problem(shared_layers=2)
    staying = Recycle(JOB, IterationTimes(problem), RecycleConstants(moves=False))
    live = frozenset(JOB.shape.workers())
    first = staying.begin(Members(JOB.shape, live))
    lost = Worker(1, 2)
    decision = staying.change(MembershipChange(1, Members(JOB.shape, live - {lost}), (lost,)), first.state)
    assert "transfer" not in {pause.cause for pause in decision.pauses}
    assert staying._held_profile.stages[1].static_bytes == problem.static_bytes(1)
    assert problem.static_bytes(1) > JOB.problem().static_bytes(1)
    # A worker that comes back copies the shared layers, too.
    back = staying.change(MembershipChange(2, Members(JOB.shape, live), (), (lost,)), decision.state)
    copied = {pause.cause: pause.time_us for pause in back.pauses}["transfer"]
    assert copied == JOB.profile().peer_link.time_us(problem.static_bytes(2))


def test_shared_layers_are_chosen_by_plans_and_left_out_where_they_do_not_fit(tmp_path):
    assert shared_layers_of_job(JOB, tmp_path) in (1, 2)
    tight = SimulatedJob.of("layers=4,hidden=4096,heads=32,sequence=512,vocabulary=1", "a100-80,memory=5GB", Shape(3, 4, 4))
    assert shared_layers_of_job(tight, tmp_path) == 0


def test_the_dead_workers_to_expect_are_those_of_the_traces():
    def trace(text):
        nodes = "".join(f"0,add,node{number}\n" for number in range(6))
        return Trace.parse(f"{nodes}{text}# end 60000")

    assert expected_dead([trace("")], 6) == (0, 0, 0)
    # Nobody for 20 s, one for 20 s, two for 20 s.
    some = trace("20000,remove,node0\n40000,remove,node1\n")
    assert expected_dead([some], 6) == (0, 1, 2)
    assert expected_dead([some], 5) == (0, 0, 1)  # one node is a spare
    assert expected_dead([some, trace("1,remove,node0\n"), trace("1,remove,node0\n")], 6) == (1, 1, 1)


def test_layers_are_shared_for_the_dead_workers_of_the_trace(tmp_path):
    periods = {
        dead: [IterationTimes(JOB.problem(shared_layers=shared), tmp_path).exactly([dead])[0].period_us for shared in range(3)]
        for dead in (0, 2)
    }
    for dead, found in periods.items():
        assert shared_layers_of_job(JOB, tmp_path, (dead,)) == found.index(min(found))


def test_recycle_with_cuts_is_faster_than_every_other_system_with_one_dead_worker(tmp_path):
    context = SystemContext(JOB, Constants.for_model(1e9), tmp_path)
    members = Members(JOB.shape, frozenset(JOB.shape.workers()) - {Worker(1, 2)})
    spared = ("ideal", "checkpoint-restart-spare", "checkpoint-restart-spare-zb")  # not on the same workers
    systems = [make(context) for name, make in SYSTEMS.items() if name not in spared]
    rates = {system.name: system.begin(members).steady_state.samples_per_s for system in systems}
    best = rates.pop("recycle")
    assert best > max(rates.values())


def test_a_plan_with_slow_workers_is_kept_by_its_signature(tmp_path):
    times = IterationTimes(JOB.problem(shared_layers=1), tmp_path)
    slow = ((), (0.6,), (), ())
    found = times.for_distribution((0, 0, 1, 0), slow)
    assert found == IterationTimes(JOB.problem(shared_layers=1), tmp_path).for_distribution((0, 0, 1, 0), slow)
    assert found.distribution == (0, 0, 1, 0)
    # Fifteen workers, of which one computes at 60 %: no iteration is shorter than their share of the work.
    assert found.period_us >= times.fault_free().work_us / 14.6


def test_a_context_parallel_job_divides_activations_and_keeps_its_state():
    text = "family=llama,layers=8,hidden=512,heads=8,kv_heads=2,ffn=1024,sequence=4096,vocabulary=1000"
    whole, parts = (SimulatedJob.of(text, "h100", Shape(2, 2, 4), context_parallel=degree) for degree in (1, 4))
    assert parts.state_bytes == whole.state_bytes
    assert parts.layers[1].activation_bytes == whole.layers[1].activation_bytes / 4
    assert parts.profile().stages[1].activation_bytes == pytest.approx(whole.profile().stages[1].activation_bytes / 4, abs=1)
    # Boundaries for shared layers are drawn with the same costs.
    assert parts.problem(shared_layers=1).profile.name.endswith("c=4 on h100")
