"""The fit of a profile to spans: durations to the microsecond, links, factors of workers, contention."""

import math
import random
from statistics import pstdev

import pytest

from recycle.core.cluster import Shape, Worker
from recycle.core.events.op_columns import OPTIMIZER, REDUCE
from recycle.core.op import Kind
from recycle.core.profile import Link, Profile, Spread, Taken
from recycle.profiling.contention import TimedOp
from recycle.profiling.plan_runner import PlanRun, StateBytes
from recycle.profiling.profile_fit import ProfileFit, RelativeTimes
from recycle.runtime.compute.stage_bytes import StageBytes
from recycle.runtime.execute.spans import Span

pytestmark = pytest.mark.timeout(60)
TAKEN = Taken("cpu", "a machine", "2.11", 2, 3, "GPT")
F, I, W, B = Kind.F, Kind.I, Kind.W, Kind.B  # noqa: E741 - the kinds by their names


def spans(*texts):
    """Spans from `label asked start end`; what follows all ops is not asked for."""
    made = []
    for label, *times in map(str.split, texts):
        *asked, start, end = map(int, times)
        made.append(Span(label, start, end, asked_us=asked[0] if asked else 0))
    return made


def moved(given_spans, by_us):
    return [Span(one.label, one.start_us + by_us, one.end_us + by_us, asked_us=one.asked_us + by_us) for one in given_spans]


FIRST = spans("0F0@0 100 100 140", "0B0@0 150 300 350", f"{REDUCE} 360 380", f"{OPTIMIZER} 381 390")
LAST = spans("1F0@0 90 165 205", "1B0@0 210 210 280", f"{REDUCE} 285 300", f"{OPTIMIZER} 300 320")


def fitted(num_pipelines, runs, first=0):
    fit = ProfileFit(Shape(num_pipelines, 2, 1), 2 * num_pipelines - 1)
    fit.add({Worker.parse(name): PlanRun(own) for name, own in runs.items()}, first)
    return fit


def one_pipeline():
    """Two iterations, of which the second begins 300 µs after the first at stage 0, and 240 µs after it at stage 1."""
    return fitted(1, {"W0_0": [FIRST, moved(FIRST, 300)], "W0_1": [LAST, moved(LAST, 300)]})


def test_an_op_takes_until_its_worker_is_free_for_the_next_one_and_waiting_is_not_part_of_it():
    assert one_pipeline().medians() == {(0, F): 50, (0, B): 60, (1, F): 45, (1, B): 75}


def test_a_message_takes_from_when_its_sender_is_free_to_the_start_of_the_op_that_waited_for_it():
    # W0_0 is free at 150 and 1F0 starts at 165; W0_1 is free at 285 and 0B0 starts at 300.
    assert one_pipeline().messages_us == [15, 15, 15, 15]
    assert one_pipeline().receives_us == []


def test_an_op_that_found_its_message_long_there_says_what_taking_it_costs():
    late = spans("1F0@0 60140 60147 60200", "1B0@0 60200 60200 60280", f"{REDUCE} 60285 60300")
    early = spans("0F0@0 100 100 140", "0B0@0 150 60300 60350", f"{REDUCE} 60360 60380")
    fit = fitted(1, {"W0_0": [early], "W0_1": [late]})
    assert fit.receives_us == [7]
    assert fit.messages_us == [15]  # only that of the gradient, which 0B0 waited for


def test_a_message_that_was_there_a_little_before_says_nothing():
    soon = spans("1F0@0 141 160 205", "1B0@0 210 210 280", f"{REDUCE} 285 300")
    fit = fitted(1, {"W0_0": [FIRST], "W0_1": [soon]})
    assert (fit.receives_us, fit.messages_us) == ([], [15])


def test_a_step_takes_from_the_end_of_the_reduction_until_the_worker_is_free_for_the_next_iteration():
    # 0F0 is asked for at 400, 20 µs after the reduction; 1F0 at 390, 90 µs after its own.
    assert dict(one_pipeline().steps_us) == {Worker(0, 0): [20], Worker(0, 1): [90]}


def test_a_lean_step_takes_both_of_its_computations_and_the_ops_behind_the_second_count():
    def iteration(*settled):
        return spans("0F0@0 100 100 140", *settled, "0B0@0 250 300 350", f"{REDUCE} 360 380", f"{OPTIMIZER} 381 390")

    # The worker waits for the verdict from 150 on, and computes the step again from 200 to 240.
    run = [iteration(), *(moved(iteration(f"{OPTIMIZER} 200 240"), by_us) for by_us in (300, 600))]
    fit = fitted(1, {"W0_0": run, "W0_1": [LAST, moved(LAST, 300), moved(LAST, 600)]}, first=1)
    assert fit.steps_us[Worker(0, 0)] == [20 + 40]
    assert fit.medians() == {(0, F): 40, (0, B): 60, (1, F): 45, (1, B): 75}


def test_a_lean_step_that_is_computed_again_before_any_op_takes_no_longer_while_its_worker_waits_for_the_verdict():
    again = spans(f"{OPTIMIZER} 40 60", "1F0@0 90 165 205", "1B0@0 210 210 280", f"{REDUCE} 285 300", f"{OPTIMIZER} 305 330")
    fit = fitted(1, {"W0_0": [FIRST, moved(FIRST, 300)], "W0_1": [LAST, moved(again, 300)]})
    # The step ends 20 µs after the reduction. The worker waits until 340, and computes it again from then to 360.
    assert fit.steps_us[Worker(0, 1)] == [20 + 20]


def test_a_reduction_begins_when_its_last_peer_is_there():
    others = {name: [moved(own, 5)] for name, own in (("W1_0", FIRST), ("W1_1", LAST))}
    fit = fitted(2, {"W0_0": [FIRST], "W0_1": [LAST], **others})
    # At stage 0 the last one comes at 365, and they end at 380 and 385; at stage 1 it comes at 290.
    assert dict(fit.reductions_us) == {0: [15, 20], 1: [10, 15]}


def test_the_first_iterations_do_not_count():
    slow = spans("0F0@0 100 100 9999", "0B0@0 9999 9999 9999", f"{REDUCE} 9999 9999")
    fit = fitted(1, {"W0_0": [slow, moved(FIRST, 10_000)], "W0_1": [moved(LAST, -7), moved(LAST, 10_000)]}, first=1)
    assert fit.medians() == {(0, F): 50, (0, B): 60, (1, F): 45, (1, B): 75}
    assert dict(fit.steps_us) == {}
    assert len(fit.reductions_us[0]) == 1


def test_while_one_computes_those_who_compute_at_the_same_time_are_counted():
    # Stages of one micro-batch take turns, but when 0B0 begins at 300, stage 1 has reduced and steps until 320: 20 of 60 µs.
    assert [op.shares for op in fitted(1, {"W0_0": [FIRST], "W0_1": [LAST]}).all_ops()] == [
        pytest.approx(shares) for shares in ([1, 0], [40 / 60, 20 / 60], [1, 0], [1, 0])
    ]
    twice = {name: [own] for name, own in (("W0_0", FIRST), ("W0_1", LAST), ("W1_0", FIRST), ("W1_1", LAST))}
    (forward, backward), *_ = fitted(2, twice).ops
    assert forward.shares == [0, 1, 0, 0]
    assert backward.shares == pytest.approx([0, 40 / 60, 0, 20 / 60])


# Of durations that are given.


def durations(*workers, num_pipelines=2):
    """A fit of these durations, a list for each worker: {(stage, kind): [µs, ...]}, all of them with one other at work."""
    shares = [0.0, 1.0, 0.0, 0.0]
    listed = [[TimedOp(what, took_us, shares) for what, times in own.items() for took_us in times] for own in workers]
    return ProfileFit(Shape(num_pipelines, 2, 1), 3, listed)


def test_a_worker_that_takes_longer_for_everything_has_a_factor_and_no_spread():
    fit = durations(*({(0, F): [5 * n, 5 * n], (0, W): [10 * n]} for n in (10, 12, 15)))
    assert fit.medians() == {(0, F): 60, (0, W): 120}
    relative = RelativeTimes(fit.ops, fit.medians(), [1, 1, 1, 1])
    assert relative.factors == pytest.approx([10 / 12, 1, 15 / 12])
    assert relative.spreads() == {(0, F): 0, (0, W): 0}


def test_workers_that_differ_by_no_more_than_their_ops_do_are_equally_fast():
    chance = random.Random(1)
    equal = [[TimedOp((0, F), round(1000 * chance.gauss(1, 0.1)), [1.0]) for _ in range(50)] for _ in range(40)]
    relative = RelativeTimes(equal, {(0, F): 1000}, [1.0])
    raw, lasting = pstdev(relative.factors), pstdev(relative.lasting_factors())
    assert raw == pytest.approx(0.1 * math.sqrt(math.pi / 2 / 50), rel=0.3)  # that of a median of 50
    assert lasting < 0.6 * raw
    # Of a slow one among them, nearly all is left.
    slow = [
        [TimedOp((0, F), round(1.4 * op.took_us), [1.0]) for op in own] if place < 4 else own for place, own in enumerate(equal)
    ]
    found = sorted(RelativeTimes(slow, {(0, F): 1000}, [1.0]).lasting_factors())
    assert found[-4] > 1.35
    assert RelativeTimes([], {}, [1.0]).lasting_factors() == []


def test_the_spread_is_half_of_what_is_between_the_quartiles():
    fit = durations({(0, F): [60, 80, 100, 120, 140, 160, 180]})  # quartiles 80 and 160
    assert RelativeTimes(fit.ops, fit.medians(), [1, 1, 1, 1]).spreads() == {(0, F): 40}


def test_what_contention_explains_is_neither_a_factor_nor_a_spread():
    op_type = (0, F)
    ops = [[TimedOp(op_type, 100, [1, 0]), TimedOp(op_type, 150, [0, 1]), TimedOp(op_type, 125, [0.5, 0.5])] for _ in range(3)]
    relative = RelativeTimes(ops, {op_type: 100}, [1, 1.5])
    assert relative.factors == pytest.approx([1, 1, 1])
    assert relative.spreads() == {op_type: 0}


def test_the_median_change_is_the_share_by_which_the_median_that_moved_most_has_moved():
    fit = durations({(0, F): [102], (1, F): [95]})
    assert fit.median_change({(0, F): 100, (1, F): 100}) == pytest.approx(0.05)
    assert fit.median_change({(0, F): 102}) == 1  # a median that was not there before has moved all the way
    assert fit.median_change(fit.medians()) == 0


SIZES = [StageBytes(50, 30, 600), StageBytes(40, 20, 4)]
STATES = {0: StateBytes(1000, 1200), 1: StateBytes(900, 1200)}


def measured(num_pipelines=2):
    """A profile of two stages of which stage 1 takes twice as long."""
    usual = {F: 100, I: 120, W: 40, B: 150}
    both = {(stage, kind): [took_us * (stage + 1)] * 3 for stage in (0, 1) for kind, took_us in usual.items()}
    fit = durations(both, num_pipelines=num_pipelines)
    fit.receives_us, fit.messages_us = [4, 5, 6], [15, 15, 99]
    fit.reductions_us.update({0: [20, 20], 1: [20, 24]})
    # One of the first stage's workers puts in the norm, and takes longer.
    fit.steps_us.update({Worker(0, 0): [33, 35], Worker(1, 0): [20, 99, 21], Worker(0, 1): [50]})
    return fit.profile(SIZES, STATES, 4.0, TAKEN)


def test_ops_that_take_a_message_pay_for_taking_it():
    first, last = measured().stages
    # F of the first stage and I of the last one take none, W never does.
    assert (first.forward_us, first.input_us, first.weight_us, first.fused_us) == (100, 125, 40, 155)
    assert (last.forward_us, last.input_us, last.weight_us, last.fused_us) == (205, 240, 80, 300)
    assert (first.optimizer_us, last.optimizer_us) == (34, 50)


def test_a_profile_has_the_sizes_and_says_what_it_was_taken_on():
    profile = measured()
    first = profile.stages[0]
    assert (first.activation_bytes, first.weight_held_bytes, first.output_bytes) == (50, 30, 600)
    assert (first.static_bytes, first.gradient_bytes, first.spread) == (1000, 1200, Spread())
    assert (profile.taken, profile.factors, profile.contention) == (TAKEN, (1.0,), (1.0, 1.0, 1.0, 1.0))
    assert profile.name == "GPT, measured with 4 workers on a machine"
    assert Profile.from_json(profile.to_json()) == profile


def test_links_take_what_messages_and_reductions_took():
    profile = measured()
    # A message took 15 µs, of which taking it is part of the op; the smallest takes 4.
    assert profile.stage_link == Link(4, 600 / 6)
    assert profile.comm_us(0) == 10
    # The reductions took 20 and 22 µs: in a ring of two that is two messages of half of the gradient.
    assert profile.peer_link.latency_us == 4
    assert profile.peer_link.bytes_per_us == pytest.approx(600 / 6.5)
    assert profile.reduce_us(0, 2) == 21


def test_one_pipeline_has_no_peers_and_its_reductions_take_no_time():
    profile = measured(num_pipelines=1)
    assert profile.reduce_us(0, 1) == 0
    assert profile.peer_link.time_us(10**6) == 1


def test_of_many_factors_as_many_are_kept_as_one_can_read_with_both_ends():
    everything = [(stage, kind) for stage in (0, 1) for kind in Kind]
    fit = durations(*({what: [100 + n] for what in everything} for n in range(-50, 51)))
    fit.reductions_us.update({0: [20], 1: [20]})
    fit.steps_us.update({Worker(0, 0): [33], Worker(0, 1): [50]})
    factors = fit.profile(SIZES, STATES, 4.0, TAKEN).factors
    assert len(factors) == 25
    assert (factors[0], factors[12], factors[-1]) == (0.5, 1.0, 1.5)
    assert list(factors) == sorted(factors)
