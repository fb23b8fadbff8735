"""The load split against a linear program, and what whole cuts make of it."""

from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

import recycle
from recycle.core.plans.op_costs import OpCosts
from recycle.core.problem import Problem
from recycle.planner.model.assignment import Assignment, speeds_of
from recycle.planner.model.chain_cuts import assign
from recycle.planner.model.load_split import WorkLine, fits, split_points_us, work_line
from recycle.planner.model.routing import balanced_routes, routes_by_speed


@st.composite
def work_lines(draw: st.DrawFn) -> WorkLine:
    num_stages, each = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    shared = draw(st.integers(0, each // 2))  # with more, a stage could have less than nothing in the linear program
    num_layers = num_stages * each
    work = np.concatenate([[0], np.cumsum([draw(st.integers(1, 20)) for _ in range(num_layers)])]).tolist()
    bounds = range(each, num_layers, each)
    lows, highs = ((0, *(at + step for at in bounds), num_layers) for step in (-shared, shared))
    speeds = tuple(draw(st.sampled_from([0.5, 1.0, 2.6, 3.0, 4.0])) for _ in range(num_stages))
    lost = tuple(draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])) for _ in range(num_stages))
    return WorkLine(tuple(work), tuple(lows), tuple(highs), speeds, lost)


def by_linear_program(line: WorkLine) -> float:
    """The least time, with the point of each inner boundary and the time as variables."""
    num = len(line.speeds)
    rows, limits = [], []
    for stage in range(num):
        row, fixed = [0.0] * num, 0.0
        row[-1] = -line.speeds[stage]
        if stage + 1 < num:
            row[stage] += 1.0
        else:
            fixed += line.work_us[-1]
        if stage > 0:
            row[stage - 1] -= 1.0
        rows.append(row)
        limits.append(-fixed - line.speeds[stage] * line.lost_us[stage])
    ranges = [(line.work_us[line.lows[at]], line.work_us[line.highs[at]]) for at in range(1, num)]
    return float(linprog([0.0] * (num - 1) + [1.0], A_ub=rows, b_ub=limits, bounds=[*ranges, (0, None)]).fun)


def fits_by_linear_program(line: WorkLine, rooms: list[float]) -> bool:
    """Whether the points of the inner boundaries can be chosen so that no stage has more than its room."""
    steps = np.diff(np.eye(len(rooms) + 1), axis=0)  # the work of a stage, from the points of all boundaries
    ranges = [(line.work_us[low], line.work_us[high]) for low, high in zip(line.lows, line.highs, strict=True)]
    found = linprog(np.zeros(len(ranges)), np.concatenate([steps, -steps]), [*rooms, *[0.0] * len(rooms)], bounds=ranges)
    return bool(found.status == 0)


@settings(max_examples=100, deadline=None)
@given(work_lines(), st.randoms(use_true_random=False), st.floats(0.7, 1.3))
def test_work_fits_if_and_only_if_the_linear_program_has_a_solution(line: WorkLine, random: Random, factor: float) -> None:
    share = line.work_us[-1] / len(line.speeds)
    rooms = [round(share * factor * random.uniform(0.5, 1.5), 2) + 0.001 for _ in line.speeds]  # never equal to whole work
    assert fits(line, rooms) == fits_by_linear_program(line, rooms)


@settings(max_examples=60, deadline=None)
@given(work_lines())
def test_the_taut_string_stays_in_its_intervals_and_needs_the_least_time(line: WorkLine) -> None:
    points = split_points_us(line)
    for at, point in enumerate(points):
        assert line.work_us[line.lows[at]] - 1e-6 <= point <= line.work_us[line.highs[at]] + 1e-6
    times = np.diff(points) / line.speeds + line.lost_us
    assert np.isclose(times.max(), by_linear_program(line))


def cut_problem(fail: str = "", shared: int = 2, speeds: str = "") -> Problem:
    return recycle.problem(4, 8, 32, costs="100,130,90", fail=fail, layers=32, shared_layers=shared, speeds=speeds)


def test_one_dead_worker_costs_every_stage_the_same() -> None:
    problem = cut_problem("W1_2")
    line, least_us = work_line(problem), 32 * 32 * 320 / 31  # the work of a worker times the workers, over the live
    assert fits(line, [speed * least_us for speed in line.speeds])
    assert not fits(line, [speed * (least_us - 1) for speed in line.speeds])
    loads = assign(problem).loads_us(problem)
    live = loads[speeds_of(problem) > 0]
    assert live.max() < 1.01 * live.mean()


def test_even_stages_with_nobody_dead_are_not_cut() -> None:
    assert not assign(cut_problem()).offsets.any()


def test_a_micro_batch_has_as_many_layers_at_a_stage_as_others_or_one_more() -> None:
    assignment = assign(cut_problem("W1_2"))
    num_layers = 4 + np.diff(assignment.offsets, axis=0)
    spread = num_layers.max(axis=1) - num_layers.min(axis=1)
    assert spread.max() <= 2  # balancing shifts a few by a layer
    assert (np.abs(num_layers - np.median(num_layers, axis=1, keepdims=True)) > 1).mean() < 0.01


def test_first_and_last_micro_batches_of_all_pipelines_are_cut_at_one_place() -> None:
    problem = cut_problem("W1_2")
    offsets = assign(problem).offsets.reshape(9, 4, 32)
    for ends in (offsets[:, :, :2], offsets[:, :, -2:]):
        assert (ends == ends[:, :, :1]).all()


def test_a_worker_at_60_percent_gets_60_percent_of_the_micro_batches() -> None:
    problem = cut_problem(shared=0, speeds="W0_3=0.6")
    counts = np.bincount(routes_by_speed(problem)[3], minlength=4)
    assert counts.tolist() == [21, 36, 36, 35]
    assert (routes_by_speed(problem)[:3] == balanced_routes(problem)[:3]).all()


def test_cuts_take_over_what_a_slow_worker_leaves() -> None:
    problem = cut_problem(speeds="W0_3=0.6")
    loads = assign(problem).loads_us(problem)
    assert loads.max() < 1.02 * 32 * 320 * 32 / 31.6


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["", "W1_2", "W0_0,W1_2,W3_2"]), st.sampled_from(["", "W0_3=0.6", "W2_2=0.35,W0_0=1.7"]))
def test_lengths_of_an_assignment_are_those_of_its_plan(fail: str, speeds: str) -> None:
    problem = replace(cut_problem(fail), speeds=recycle.problem(4, 8, 32, costs="1,1,1", speeds=speeds).speeds)
    assignment = assign(problem)
    costs = OpCosts(problem, assignment.cuts)
    for stage in range(8):
        for chain in (0, 5, 33, 127):
            worker = recycle.Worker(int(assignment.pipeline[stage, chain]), stage)
            lengths = assignment.lengths_us[:, stage, chain].tolist()
            assert [costs.durations_us(worker, kind, [chain])[0] for kind in "FIWB"] == lengths
            assert costs.memory_deltas(worker, "F", [chain]) == [assignment.taken[stage, chain]]


def test_other_routes_have_the_speeds_of_other_workers() -> None:
    problem = cut_problem(shared=0, speeds="W0_3=0.5")
    home = Assignment.of(problem, np.repeat(np.repeat(np.arange(4), 32)[None], 8, axis=0))
    assert home.lengths_us[0, 3, :33].tolist() == [200] * 32 + [100]
