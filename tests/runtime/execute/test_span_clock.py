"""The clock of spans: how far the host is ahead of a GPU, and that spans say when the GPU ran an op. The GPU is simulated."""

from collections import deque
from itertools import pairwise

import pytest
import torch

import recycle
from recycle.core.events.op_columns import OPTIMIZER, REDUCE
from recycle.core.plans.row_programs import row_programs
from recycle.runtime.compute.state_digests import digest
from recycle.runtime.execute import span_clock
from recycle.runtime.execute.span_clock import AHEAD, SpanClock
from recycle.runtime.execute.spans import now_us
from recycle.runtime.job import Job
from recycle.runtime.launch.configure import worker_spec
from recycle.runtime.options import TrainOptions
from recycle.runtime.transport.activity import Activity
from recycle.runtime.transport.gloo import GlooTransport
from recycle.runtime.transport.specs import GroupView
from recycle.runtime.worker.epoch_setup import make_stage_state, make_trainer, worker_program
from tests.runtime.jobs import Numbers, adamw, loss, small_stages
from tests.runtime.transport.worker_threads import at_once, rendezvous_of, transport_spec

CPU = torch.device("cpu")
pytestmark = pytest.mark.timeout(60)


class Gpu:
    """A stream of ops and events; it runs when somebody waits for it. Times are in µs of its own clock."""

    def __init__(self):
        self.now_us, self.queue = 700.0, deque()

    def launch(self, duration_us):
        self.queue.append(duration_us)

    def record(self):
        event = Event(self)
        self.queue.append(event)
        return event

    def run(self):
        """Run the next op, or note when the next event is."""
        first = self.queue.popleft()
        if isinstance(first, Event):
            first.at_us = self.now_us
        else:
            self.now_us += first


class Event:
    def __init__(self, gpu):
        self.gpu, self.at_us = gpu, None

    def query(self):
        return self.at_us is not None

    def synchronize(self):
        while not self.query():
            self.gpu.run()

    def elapsed_time(self, other):
        return (other.at_us - self.at_us) / 1e3


@pytest.fixture
def gpu():
    return Gpu()


@pytest.fixture
def clock(gpu, monkeypatch):
    """The clock of a worker on that GPU; its host's clock stands at 5000 µs."""
    monkeypatch.setattr(span_clock, "now_us", lambda: 5000)
    return SpanClock(CPU, gpu.record)


def launch(clock, gpu, label, duration_us, spans, asked_us=0):
    start = clock.start()
    gpu.launch(duration_us)
    clock.stop(label, start, spans, asked_us)


def test_spans_have_the_times_of_the_gpu_in_the_clock_of_the_machine(clock, gpu):
    spans = []
    for label, duration_us in (("a", 100), ("b", 40), ("c", 7)):
        launch(clock, gpu, label, duration_us, spans)
    clock.settle()
    assert [(span.label, span.start_us, span.end_us) for span in spans] == [
        ("a", 5000, 5100),
        ("b", 5100, 5140),
        ("c", 5140, 5147),
    ]


def test_a_worker_is_free_for_an_op_when_the_gpu_has_run_the_one_before(clock, gpu):
    spans = []
    launch(clock, gpu, "a", 100, spans, asked_us=4990)
    launch(clock, gpu, "b", 40, spans, asked_us=5010)  # asked for while the GPU runs a
    gpu.launch(500)  # something else
    launch(clock, gpu, "c", 40, spans, asked_us=5200)  # asked for when the GPU had run b
    clock.settle()
    assert [span.asked_us for span in spans] == [4990, 5100, 5200]


def test_the_host_waits_for_the_oldest_op_only(clock, gpu):
    spans = []
    for label in "abcd":
        clock.settle(AHEAD)
        launch(clock, gpu, label, 10, spans)
    assert [span.label for span in spans] == ["a"]
    assert clock.oldest == "b"
    clock.settle()
    assert clock.oldest == ""


def test_a_slowed_gpu_idles_after_each_op_and_its_host_waits_for_the_first_of_a_class_only(clock, gpu):
    """Each takes as much longer as the last known op of its class took: at first the first one, which the host waits for."""
    spans, own = [], SpanClock(CPU, gpu.record, lambda time_ms: gpu.launch(1e3 * time_ms))
    for label, duration_us in (("a", 100), ("b", 120), ("c", 140)):
        own.settle(AHEAD)
        start = own.start()
        gpu.launch(duration_us)
        own.slowed.slow_down(start, 0.5, "F")
        own.stop(label, start, spans)
        assert gpu.now_us - 700 == 100  # the host has waited for the first op, and for no other
    while gpu.queue:
        gpu.run()
    start = own.start()
    gpu.launch(50)
    own.slowed.slow_down(start, 0.5, "F")
    own.stop("d", start, spans)
    own.settle()
    assert [span.end_us - span.start_us for span in spans] == [200, 220, 240, 190]


def test_what_an_iteration_waits_for_is_not_what_the_next_one_has_launched(clock, gpu):
    first, second = [], []
    launch(clock, gpu, "a", 10, first)
    launch(clock, gpu, "b", 10, second)
    clock.settle_spans(first)
    assert [span.label for span in first] == ["a"]
    assert second == []


def test_after_a_failure_nobody_waits_for_the_gpu(clock, gpu):
    spans = []
    launch(clock, gpu, "a", 10, spans)
    launch(clock, gpu, "b", 10, spans)
    for _ in range(3):
        gpu.run()
    clock.collect()
    assert [span.label for span in spans] == ["a"]
    clock.collect()
    assert len(spans) == 1


def test_a_worker_computes_as_long_as_its_gpu_does_although_its_host_waits(clock, gpu):
    activity, spans = Activity(), []
    activity.on_gpu = clock.running
    launch(clock, gpu, "a", 10, spans)
    launch(clock, gpu, "b", 10, spans)
    activity.begin("c")
    assert activity.seen().label == "c"
    activity.wait_for("W0_1")
    assert (activity.seen().label, activity.seen().waits_for) == ("a", "")
    for _ in range(5):  # the event of the comparison, then a
        gpu.run()
    assert activity.seen().label == "b"
    clock.settle()
    assert (activity.seen().label, activity.seen().waits_for) == ("c", "W0_1")


def test_clocks_are_compared_again_when_the_gpu_has_nothing_left_to_do(clock, gpu, monkeypatch):
    spans = []
    launch(clock, gpu, "a", 10, spans)
    clock.settle()
    monkeypatch.setattr(span_clock, "now_us", lambda: 9000)
    launch(clock, gpu, "b", 10, spans)
    clock.settle()
    assert [(span.start_us, span.end_us) for span in spans] == [(5000, 5010), (9000, 9010)]


def test_on_a_cpu_an_op_has_ended_when_its_call_returns():
    clock, spans, before_us = SpanClock(CPU), [], now_us()
    clock.stop("a", clock.start(), spans, asked_us=before_us)
    assert clock.oldest == ""
    (span,) = spans
    assert before_us <= span.start_us <= span.end_us <= now_us()


def trained(plan, clock_of):
    """The digest of each worker's stage after three steps, and the spans of its iterations."""
    workers = [row.worker for row in plan.rows]
    spec = worker_spec(Job(plan, small_stages(2), Numbers(), loss, adamw, 3, options=TrainOptions(is_exact=True)))
    transport_of = transport_spec(spec.boundaries, spec.shape.num_chains)

    def train(worker, store):
        view, program = GroupView(worker, workers, epoch=1), worker_program(row_programs(plan)[worker], plan.problem.shape)
        transport, iterations = GlooTransport(store, view, transport_of), []
        try:
            trainer = make_trainer(spec, program, view, make_stage_state(spec, worker.stage), transport)
            trainer.executor.clock = clock_of()
            assert trainer.train(3, lambda iteration, losses, spans, verdict: iterations.append(list(spans)))
            labels = [instruction.label for instruction in program.instructions]
            return digest(trainer.executor.stage.module), iterations, labels
        finally:
            transport.abort()
            transport.close()

    return at_once(*(lambda pair=pair: train(*pair) for pair in zip(workers, rendezvous_of(len(workers)), strict=True)))


@pytest.mark.parametrize("techniques", ["adaptive,decoupled", "adaptive,decoupled,staggered"])
def test_every_iteration_has_all_its_spans_in_order_although_ops_are_launched_ahead(techniques):
    plan = recycle.solve(recycle.problem(2, 2, 3, costs=(2, 2, 1), techniques=techniques), "greedy")
    ahead, waiting = trained(plan, lambda: SpanClock(CPU, Gpu().record)), trained(plan, lambda: SpanClock(CPU))
    assert [own for own, _, _ in ahead] == [own for own, _, _ in waiting]
    for _, iterations, labels in ahead:
        assert len(iterations) == 3
        for spans in iterations:
            assert [span.label for span in spans] == [*labels, REDUCE, OPTIMIZER]
            assert all(before.end_us <= after.start_us for before, after in pairwise(spans) if before.is_op and after.is_op)
