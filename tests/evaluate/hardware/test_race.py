"""A race on this machine's cores: all variants train the same, and what was measured is never measured again."""

import gzip
import json
import shutil
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recycle.core.errors import FileProblem, WorkerFailed
from recycle.core.events.op_columns import OPTIMIZER, REDUCE
from recycle.core.op import Kind
from recycle.core.plans.plan import Plan
from recycle.evaluate.hardware.contenders import Contender, ContenderTurn
from recycle.evaluate.hardware.race import Trial, interleaved, plan_path, read_trials, run_race, run_trial
from recycle.evaluate.hardware.setup import SEED
from recycle.evaluate.hardware.torch_contender import TORCH, TORCH_1F1B, TORCH_ZBV, TORCH_ZERO_BUBBLE, TorchContender
from recycle.evaluate.hardware.variants import variants
from recycle.models.gpt import next_byte_loss
from recycle.profiling.worker_pool import worker_pool
from recycle.runtime.compute.microbatches import MicroBatches
from tests.evaluate.hardware.tiny_setup import TINY, make_plan, save_plans

pytestmark = pytest.mark.timeout(280)
ROWS = variants(TINY)
OURS = [row for row in ROWS if not row.is_torch]
FIRST, LAST = ROWS[0], ROWS[-1]
# The gradients of one pipeline instead of two would change the second loss by twice as much, and the third by eight times.
TOLERANCE = 1e-4


def never(trial, done, of):
    raise AssertionError(f"nothing was missing, but {trial} was run")


@pytest.fixture(scope="module")
def raced(tmp_path_factory):
    """A folder with one round of one iteration of every variant, and the progress that was reported."""
    folder = tmp_path_factory.mktemp("raced")
    save_plans(folder)
    progress = []
    run_race(folder, TINY, ROWS, 1, 1, lambda trial, done, of: progress.append((trial.variant, done, of)))
    return folder, progress


@pytest.fixture(scope="module")
def resumed(raced, tmp_path_factory):
    """The race of two variants, cut off in its second line, after it went on to two rounds: its folder and the reports.

    With every turn: its round and variant, how many there were and will be, and whose spans were there by then.
    """
    folder = tmp_path_factory.mktemp("resumed") / "race"
    shutil.copytree(raced[0], folder)
    shutil.rmtree(folder / "spans")
    whole, *_, cut = (folder / "measured.jsonl").read_text().splitlines()
    (folder / "measured.jsonl").write_text(f"{whole}\n{cut[: len(cut) // 2]}")
    progress = []

    def report(trial, done, of):
        progress.append((trial.round, trial.variant, done, of, sorted(path.name for path in (folder / "spans").iterdir())))

    run_race(folder, TINY, [FIRST, LAST], 2, 1, report)
    return folder, progress


def spans_of(folder, name):
    return json.loads(gzip.decompress((folder / "spans" / f"{name}.json.gz").read_bytes()))


def test_every_variant_has_its_turn_and_is_reported(raced):
    folder, progress = raced
    names = [row.name for row in ROWS]
    assert [trial.variant for trial in read_trials(folder)] == names
    assert progress == [(name, number, len(names)) for number, name in enumerate(names, 1)]


def plain_losses(num_iterations, setup=TINY):
    """The losses of the whole model in this process, by plain torch, with the gradients of all micro-batches in every step."""
    batches, model = MicroBatches(setup.text(), setup.shape, setup.samples, SEED), nn.Sequential(*setup.modules())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for iteration in range(num_iterations):
        parts = [
            batches.get(iteration, pipeline, index)
            for pipeline, index in product(range(setup.pipelines), range(setup.microbatches))
        ]
        loss = torch.stack([next_byte_loss(model(inputs), targets) for inputs, targets in parts]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_all_variants_come_to_the_losses_of_the_whole_model_in_one_process_torchs_too(raced):
    trials = list(read_trials(raced[0]))
    assert {trial.variant for trial in trials} >= set(TORCH)
    # The iterations that warm up are trained on as well.
    expected = plain_losses(3)
    for trial in trials:
        assert trial.losses == pytest.approx(expected, abs=TOLERANCE), trial.variant


def test_every_turn_took_time_and_says_what_its_ops_took(raced):
    for trial in read_trials(raced[0]):
        assert len(trial.iterations_us) == 1
        assert trial.iteration_us == trial.iterations_us[0] > 0
        # torch does not say when its ops ran.
        assert bool(trial.ops_us) == (trial.variant not in TORCH)
        assert all(took_us > 0 for took_us in trial.ops_us.values())


def test_the_mean_over_iterations_is_what_an_iteration_takes():
    assert Trial(0, "all", [10, 20, 60], [1.0], {}).iteration_us == 30


def test_a_race_that_is_whole_runs_nothing(raced):
    folder, _ = raced
    before = (folder / "measured.jsonl").read_bytes()
    run_race(folder, TINY, ROWS, 1, 1, never)
    assert (folder / "measured.jsonl").read_bytes() == before


def test_a_race_that_was_cut_off_runs_only_what_is_missing(resumed):
    _, progress = resumed
    assert [turn[:4] for turn in progress] == [(0, LAST.name, 2, 4), (1, FIRST.name, 3, 4), (1, LAST.name, 4, 4)]


def test_a_line_that_was_cut_off_is_measured_again_and_spoils_no_other(resumed):
    folder, _ = resumed
    trials = list(read_trials(folder))
    assert [(trial.round, trial.variant) for trial in trials] == [(r, row.name) for r in range(2) for row in (FIRST, LAST)]
    run_race(folder, TINY, [FIRST, LAST], 2, 1, never)


def test_what_goes_on_later_comes_to_the_same_losses(resumed):
    first, *others = read_trials(resumed[0])
    for trial in others:
        assert trial.losses == pytest.approx(first.losses, abs=TOLERANCE)


def test_spans_are_kept_of_the_last_round_only(resumed):
    of_first, of_last = (f"{row.name}.json.gz" for row in (FIRST, LAST))
    assert [turn[4] for turn in resumed[1]] == [[], [of_first], sorted([of_first, of_last])]


@pytest.mark.parametrize("variant", OURS, ids=lambda variant: variant.name)
def test_the_spans_of_a_worker_are_its_row_then_reduction_and_step(raced, variant):
    folder, _ = raced
    plan, spans = Plan.load(plan_path(folder, variant)), spans_of(folder, variant.name)
    # Who is named is a worker of the cluster; the plan of fewer pipelines numbers those that take part.
    pipelines = variant.pipelines(TINY)
    names = {f"W{pipelines[row.worker.pipeline]}_{row.worker.stage}": row for row in plan.rows}
    assert set(spans) == set(names)
    for name, (only,) in spans.items():
        assert [label for label, *_ in only] == [*(str(slot.op) for slot in plan.slots(names[name])), REDUCE, OPTIMIZER]


@pytest.mark.parametrize("variant", OURS, ids=lambda variant: variant.name)
def test_spans_follow_each_other_from_zero_on_and_ops_say_when_they_could_have_begun(raced, variant):
    spans = spans_of(raced[0], variant.name)
    assert min(only[0][2] for (only,) in spans.values()) == 0
    for (only,) in spans.values():
        free_us = only[0][1]
        for label, asked_us, start_us, end_us in only:
            if label in (REDUCE, OPTIMIZER):
                assert asked_us is None
                assert free_us <= start_us <= end_us
            else:
                assert free_us <= asked_us <= start_us <= end_us
            free_us = end_us


def test_torchs_schedules_have_no_spans(raced):
    kept = {path.name.removesuffix(".json.gz") for path in (raced[0] / "spans").iterdir()}
    assert kept == {row.name for row in OURS}


@pytest.mark.parametrize("variant", OURS, ids=lambda variant: variant.name)
def test_the_times_of_ops_are_by_the_kinds_of_the_plan(raced, variant):
    (trial,) = [trial for trial in read_trials(raced[0]) if trial.variant == variant.name]
    kinds = {Kind(kind).value for row in Plan.load(plan_path(raced[0], variant)).rows for kind in row.kinds}
    assert set(trial.ops_us) == kinds


def test_a_plan_that_is_missing_is_named_before_anything_runs(raced, tmp_path):
    folder = tmp_path / "race"
    shutil.copytree(raced[0] / "plans", folder / "plans")
    path = plan_path(folder, LAST)
    path.unlink()
    with pytest.raises(FileProblem, match=f"^there is no plan {path}: make the plans first, with [^\n]*$"):
        run_race(folder, TINY, ROWS, 1, 1, never)
    assert [path.name for path in folder.iterdir()] == ["plans"]


def test_nothing_was_measured_in_a_folder_that_is_new(tmp_path):
    assert list(read_trials(tmp_path)) == []


def test_torchs_stages_have_the_layers_of_their_turn_and_ours_those_of_the_plan():
    """Wherever the model is cut, all train the same; a larger vocabulary makes the last layer heavier."""
    setup = replace(TINY, layers=5, vocabulary=300)
    layers = {TORCH_1F1B: (4, 1), TORCH_ZERO_BUBBLE: (1, 4), TORCH_ZBV: (2, 1, 1, 1)}
    plan = make_plan(setup.shape, "", "adaptive,decoupled,staggered")
    profile = plan.problem.profile
    ours = {
        "as given": plan,
        "other stages": replace(plan, problem=replace(plan.problem, profile=profile.with_layers([4, 1]))),
        "shared": replace(plan, problem=replace(plan.problem, profile=profile.with_layers([2, 3]), shared_layers=2)),
    }
    turns = [ContenderTurn(0, name, 3, None, range(2), layers=own) for name, own in layers.items()]
    turns += [ContenderTurn(0, name, 3, own, range(2)) for name, own in ours.items()]
    make = partial(Contender, setup, setup.job(plan).boundaries())
    expected = plain_losses(3, setup)
    with worker_pool(list(setup.shape.workers()), make, ["torch.distributed.pipelining"]) as pool:
        for number, turn in enumerate(turns):
            trial, _ = run_trial(pool, replace(turn, number=number), 0)
            assert trial.losses == pytest.approx(expected, abs=TOLERANCE), turn.variant
        wrong = replace(turns[0], number=len(turns), layers=(4, 2))
        with pytest.raises(WorkerFailed, match="the split 4, 2 does not give 5 layers to 2 stages"):
            run_trial(pool, wrong, 0)


def test_one_pipeline_without_peers_trains_the_same_by_all_schedules():
    setup = replace(TINY, pipelines=1)
    plan = make_plan(setup.shape, "", "adaptive,decoupled,staggered")
    make, expected = partial(Contender, setup, setup.job(plan).boundaries()), plain_losses(3, setup)
    with worker_pool(list(setup.shape.workers()), make, ["torch.distributed.pipelining"]) as pool:
        for number, (name, own) in enumerate([("ours", plan), *((name, None) for name in TORCH)]):
            trial, _ = run_trial(pool, ContenderTurn(number, name, 3, own, range(1)), 0)
            assert trial.losses == pytest.approx(expected, abs=TOLERANCE), name


class OverTransport:
    """A member of a pool that runs torch's schedules over our transport, as on a GPU."""

    def __init__(self, boundaries, context):
        prefix = dist.PrefixStore("race", context.store)
        dist.init_process_group("gloo", store=prefix, rank=context.rank, world_size=len(context.workers))
        self._contender = TorchContender(TINY, boundaries, context, uses_transport=True)

    def answer(self, request):
        return self._contender.run(*request)


def test_torchs_schedules_train_the_same_over_our_transport():
    plan = make_plan(TINY.shape, "", "none")
    boundaries = TINY.job(plan).boundaries()
    with worker_pool(list(TINY.shape.workers()), partial(OverTransport, boundaries), ["torch.distributed.pipelining"]) as pool:
        for number, variant in enumerate(TORCH):
            reported = [losses for _, losses in pool.ask((number, variant, 3)).values() if losses]
            assert len(reported) == TINY.pipelines, variant
            means = [sum(own) / len(own) for own in zip(*reported, strict=True)]
            assert means == pytest.approx(plain_losses(3), abs=TOLERANCE), variant


@pytest.mark.parametrize(
    ("turns", "runs", "sequence"),
    [("abcdefgh", "1234", "1ab2cd3ef4gh"), ("abc", "1234", "1a2b3c4"), ("a", "12", "1a2"), ("abc", "", "abc"), ("", "12", "12")],
)
def test_runs_lie_evenly_between_turns_and_none_is_left_out(turns, runs, sequence):
    assert "".join(interleaved(turns, runs)) == sequence
