"""Estimated profiles, against published parameter counts, measured stage times and hand-made sums."""

import hashlib
import json
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.core.cluster import Cluster, Shape
from recycle.core.errors import MemoryTooSmall, UserError
from recycle.core.layer_sums import LayerSums
from recycle.core.layers import split_layers
from recycle.core.op import Kind
from recycle.core.problem import Memory, Problem
from recycle.core.profile import Link, Profile
from recycle.planner.profiles.catalog import GPUS, MODELS, GpuSpec, ModelSpec, parse_gpu, parse_model
from recycle.planner.profiles.estimate import estimate, layer_costs

H200 = GPUS["h200"]
GPT_MODELS = {name: model for name, model in MODELS.items() if model.family == "gpt"}


@pytest.mark.parametrize(
    ("name", "billions", "tolerance"),
    [
        ("gpt3-medium", 0.350, 0.02),
        ("gpt3-3.35b", 3.35, 0.07),  # a shape "about" like the paper's
        ("gpt3-6.7b", 6.7, 0.01),
        ("gpt-18.4b", 18.4, 0.005),
        ("gpt-39.1b", 39.1, 0.005),
        ("gpt-76.1b", 76.1, 0.005),
        ("gpt-145.6b", 145.6, 0.005),
    ],
)
def test_a_model_has_as_many_parameters_as_its_name_says(name, billions, tolerance):
    assert MODELS[name].num_parameters / 1e9 == pytest.approx(billions, rel=tolerance)


# Stages of transformer layers alone on an H200, bf16, sequence 2048: hidden, heads, layers, micro-batch; F, I, W in ms, and how
# much longer I + W took than the whole backward. I is the dear part of that split, so what it should cost is the rest of
# the whole backward after W.
MEASURED = {
    1024: (16, 6, 8, 6.2, 12.2, 6.3, 1.18),
    3072: (32, 4, 2, 6.6, 10.0, 6.4, 1.14),
    4096: (32, 4, 2, 11.1, 15.6, 10.9, 1.10),
}


def inner_stage(hidden):
    """The estimate of the measured stage: the middle one of three, without embedding and head."""
    heads, layers, microbatch = MEASURED[hidden][:3]
    model = ModelSpec("measured", 3 * layers, hidden, heads, microbatch=microbatch)
    return estimate(model, H200, 3, layers=(layers,) * 3).stages[1]


@pytest.mark.parametrize(("hidden", "tolerance"), [(3072, 0.07), (4096, 0.07), (1024, 0.33)])
def test_one_efficiency_predicts_the_measured_stage_times(hidden, tolerance):
    *_, forward_ms, input_ms, weight_ms, overhead = MEASURED[hidden]
    stage, fused_ms = inner_stage(hidden), (input_ms + weight_ms) / overhead
    assert stage.forward_us == pytest.approx(1000 * forward_ms, rel=tolerance)
    assert stage.weight_us == pytest.approx(1000 * weight_ms, rel=tolerance)
    assert stage.fused_us == pytest.approx(1000 * fused_ms, rel=tolerance)
    assert stage.input_us == pytest.approx(1000 * (fused_ms - weight_ms), rel=tolerance)


def test_small_models_come_out_too_fast_and_never_too_slow():
    *_, forward_ms, input_ms, weight_ms, _ = MEASURED[1024]
    stage = inner_stage(1024)
    assert stage.forward_us < 1000 * forward_ms
    assert stage.input_us < 1000 * input_ms
    assert stage.weight_us < 1000 * weight_ms


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("model", GPT_MODELS.values(), ids=GPT_MODELS)
def test_the_kinds_lie_between_what_others_measured(model, gpu):
    """Zero Bubble's W/F on A100s is 0.50 to 0.74, ours on an H200 0.97 to 1.02; I is the longest of the three."""
    stage = estimate(model, gpu, 4).stages[1]
    assert 0.50 <= stage.weight_us / stage.forward_us <= 1.02
    assert 1.0 <= stage.input_us / stage.forward_us <= 1.4


def test_a_profile_survives_json():
    profile = estimate(MODELS["gpt3-6.7b"], GPUS["a100-80"], 8)
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_the_last_stage_gets_fewer_layers_because_the_head_costs_more_than_one():
    assert split_layers(32, 1.0, [0.1, 0, 0, 1.4]) == (8, 8, 9, 7)


def compositions(total, parts):
    for cuts in combinations(range(1, total), parts - 1):
        yield [b - a for a, b in zip((0, *cuts), (*cuts, total), strict=True)]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 11), st.data())
def test_no_other_split_has_a_faster_slowest_stage(num_layers, data):
    num_stages = data.draw(st.integers(1, min(num_layers, 5)))
    extra = data.draw(st.lists(st.integers(0, 40), min_size=num_stages, max_size=num_stages))
    found = split_layers(num_layers, 10, extra)

    def slowest(layers):
        return max(10 * number + more for number, more in zip(layers, extra, strict=True))

    assert sum(found) == num_layers
    assert min(found) >= 1
    assert slowest(found) == min(map(slowest, compositions(num_layers, num_stages)))


def test_equal_stages_are_split_evenly_and_the_rest_goes_to_the_back():
    assert split_layers(8, 1.0, [0, 0, 0, 0]) == (2, 2, 2, 2)
    assert split_layers(10, 1.0, [0, 0, 0, 0]) == (2, 2, 3, 3)


TINY = ModelSpec("tiny", num_layers=3, hidden=100, num_heads=10, sequence=1000, vocabulary=1000, microbatch=1)
# Infinite-like bandwidth leaves the matrix products alone; 1e12 FLOP/s at efficiency 1 makes 1e6 FLOPs a microsecond.
PLAIN = GpuSpec("plain", 2**40, 1e12, 1e16, 1.0, Link(0, 1e12), Link(7, 1e3))


def test_times_are_the_published_flops_over_the_peak():
    stage = estimate(TINY, PLAIN, 3).stages[1]
    # sbh = 1e5; F 24h + 4s = 6400, I 24h + 8s = 10400, W 24h = 2400.
    assert (stage.forward_us, stage.input_us, stage.weight_us, stage.fused_us) == (640, 1040, 240, 1280)


def test_the_head_adds_its_matrix_product_to_each_kind_of_the_last_stage():
    first, inner, last = estimate(TINY, PLAIN, 3).stages
    # 2sbhV = 2e8 FLOPs = 200 µs.
    assert [last.duration_us(kind) - inner.duration_us(kind) for kind in (Kind.F, Kind.I, Kind.W)] == [200, 200, 200]
    assert first.forward_us == inner.forward_us


def test_element_wise_work_takes_memory_traffic():
    slow_memory = replace(PLAIN, hbm_bytes_per_s=1e9)
    fast, slow = (estimate(TINY, gpu, 3).stages[1] for gpu in (PLAIN, slow_memory))
    # sbh * 36, 48 and 18 bytes at 1000 bytes/µs.
    assert (slow.forward_us - fast.forward_us, slow.input_us - fast.input_us, slow.weight_us - fast.weight_us) == (
        3600,
        4800,
        1800,
    )


def test_tensor_parallelism_shares_the_work_and_pays_two_all_reduces_in_f_and_i():
    stage = estimate(TINY, replace(PLAIN, intra_node=Link(3, 1e3)), 3, tensor_parallel=2).stages[1]
    # One all-reduce: 2 steps of 3 µs, and 2sbh = 2e5 bytes over two GPUs, each sending half twice: 200 µs.
    assert stage.forward_us == 640 // 2 + 2 * (6 + 200)
    assert stage.input_us == 1040 // 2 + 2 * (6 + 200)
    assert stage.weight_us == 240 // 2


def test_activations_are_34_bytes_a_value_and_weights_keep_32_of_them():
    stage = estimate(TINY, PLAIN, 3).stages[1]
    assert (stage.activation_bytes, stage.weight_held_bytes) == (34 * 10**5, 32 * 10**5)
    # 5as for each of the sb tokens.
    assert estimate(TINY, PLAIN, 3, flash=False).stages[1].activation_bytes == 34 * 10**5 + 5 * 10 * 1000 * 1000


def test_sequence_parallelism_shares_all_activations_and_the_boundary():
    shared = estimate(TINY, PLAIN, 3, tensor_parallel=2).stages[1]
    whole = estimate(TINY, PLAIN, 3, tensor_parallel=2, sequence_parallel=False).stages[1]
    assert (shared.activation_bytes, shared.weight_held_bytes, shared.output_bytes) == (17 * 10**5, 16 * 10**5, 10**5)
    assert (whole.activation_bytes, whole.weight_held_bytes, whole.output_bytes) == (22 * 10**5, 20 * 10**5, 2 * 10**5)


def test_a_parameter_takes_18_bytes_with_fp32_gradients_and_16_with_bf16():
    wide, narrow = (estimate(TINY, PLAIN, 3, gradient_bytes=size).stages[1] for size in (4, 2))
    layer = 12 * 100**2 + 13 * 100
    assert (wide.static_bytes, wide.gradient_bytes) == (18 * layer, 4 * layer)
    assert (narrow.static_bytes, narrow.gradient_bytes) == (16 * layer, 2 * layer)


@pytest.mark.parametrize("tensor_parallel", [1, 8])
def test_the_stages_together_hold_the_model_and_one_more_copy_of_the_embedding(tensor_parallel):
    model = MODELS["gpt-18.4b"]
    stages = estimate(model, H200, 10, tensor_parallel=tensor_parallel).stages
    parameters = sum(stage.gradient_bytes for stage in stages) * tensor_parallel / 4
    assert parameters == pytest.approx(model.num_parameters + model.vocabulary * model.hidden, rel=1e-6)
    alone = estimate(MODELS["gpt3-medium"], H200, 1).stages[0]
    assert alone.gradient_bytes == 4 * MODELS["gpt3-medium"].num_parameters


def test_the_step_touches_30_bytes_for_each_parameter():
    stage = estimate(TINY, replace(PLAIN, hbm_bytes_per_s=1e9), 3).stages[1]
    assert stage.optimizer_us == round((12 * 100**2 + 13 * 100) * 30 / 1000)


def test_links_and_memory_come_from_the_gpu():
    profile = estimate(TINY, PLAIN, 3)
    assert profile.stage_link == profile.peer_link == Link(7, 1e3)
    assert profile.device_bytes == 2**40
    assert profile.comm_us(0) == 7 + 2 * 10**5 / 1e3


def test_a_split_that_costs_extra_makes_the_fused_backward_the_cheaper_one():
    stage = estimate(TINY, PLAIN, 3, split_overhead=1.10).stages[1]
    assert (stage.input_us, stage.weight_us, stage.fused_us) == (1040, 240, round(1280 / 1.10))


def test_no_cost_is_rounded_to_nothing():
    model = ModelSpec("dust", 2, 1, 1, sequence=1, vocabulary=1)
    stage = estimate(model, GPUS["h200"], 2).stages[0]
    assert (stage.forward_us, stage.input_us, stage.weight_us, stage.optimizer_us) == (1, 1, 1, 1)


@pytest.mark.parametrize("options", [{}, {"tensor_parallel": 4}, {"flash": False, "gradient_bytes": 2}])
def test_the_layers_of_an_estimate_add_up_to_the_estimate_of_any_other_split(options):
    model = ModelSpec("small", 8, 512, 8, sequence=256, vocabulary=30_000)
    sums = LayerSums(estimate(model, H200, 3, layers=(3, 3, 2), **options))
    assert sums.bounds == (0, 3, 6, 8)
    for split in ((1, 4, 3), (4, 3, 1), (2, 2, 4), (5, 2, 1)):
        start = 0
        for number, stage in zip(split, estimate(model, H200, 3, layers=split, **options).stages, strict=True):
            for name in ("forward_us", "input_us", "weight_us", "fused_us", "optimizer_us"):
                assert sums.total(name, range(start, start + number)) == pytest.approx(getattr(stage, name), abs=3)
            for name in ("activation_bytes", "static_bytes", "gradient_bytes"):
                assert sums.total(name, range(start, start + number)) == pytest.approx(getattr(stage, name), rel=1e-6, abs=3)
            start += number


def test_a_model_in_one_stage_has_embedding_and_head_in_its_outer_layers():
    (layers,) = estimate("gpt3-medium", H200, 1).layers
    assert len(layers) == 24
    assert layers[0].parameters > 1.1
    assert layers[-1].forward > 1.1
    assert len(set(layers[1:-1])) == 1


def test_a_model_that_is_too_large_for_its_gpus_is_refused_by_the_problem():
    profile = estimate(MODELS["gpt-18.4b"], GPUS["a100-80"], 2)
    with pytest.raises(MemoryTooSmall, match=r"stage 0 has 74\.5 GiB of memory, too little for any schedule"):
        Problem(Cluster(Shape(4, 2, 8)), profile, Memory.bytes([profile.device_bytes] * 2))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpt3-6.7b", MODELS["gpt3-6.7b"]),
        ("6.7b", MODELS["gpt3-6.7b"]),
        ("GPT-145.6B", MODELS["gpt-145.6b"]),
        ("medium,microbatch=8", replace(MODELS["gpt3-medium"], microbatch=8)),
        ("layers=24, hidden=1024, heads=16", replace(MODELS["gpt3-medium"], name="custom")),
        ("mine,layers=2,hidden=8,heads=2,sequence=4,vocabulary=5,microbatch=6", ModelSpec("mine", 2, 8, 2, 4, 5, 6)),
        ({"name": "mine", "layers": 2, "hidden": 8, "heads": 2, "sequence": 4}, ModelSpec("mine", 2, 8, 2, 4)),
        ({"name": "gpt3-medium", "microbatch": 4}, replace(MODELS["gpt3-medium"], microbatch=4)),
        (
            "family=llama,layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocabulary=128256,sequence=8192",
            replace(MODELS["llama-3-8b"], name="custom"),
        ),
        ("mistral-7b,experts=8,top_k=2", replace(MODELS["mixtral-8x7b"], name="mistral-7b experts=8 top_k=2")),
        (
            {"name": "llama-3.2-1b", "tied": True, "family": "llama"},
            replace(MODELS["llama-3.2-1b"], name="llama-3.2-1b tied=True family=llama"),
        ),
    ],
)
def test_a_model_is_a_name_or_its_numbers(text, expected):
    assert parse_model(text) == expected


def test_a_changed_model_says_so_in_its_name():
    assert parse_model("gpt3-6.7b,layers=8").name == "gpt3-6.7b layers=8"
    assert parse_gpu("h100,efficiency=0.5").name == "h100 efficiency=0.5"


@pytest.mark.parametrize(
    "given_gpu",
    [
        "mine,memory=80GB,tflops=312,hbm=2039GB/s,efficiency=0.64,intra=300GB/s,inter=200Gbit/s",
        {
            "name": "mine",
            "memory": 80 * 10**9,
            "tflops": 312,
            "hbm": 2.039e12,
            "efficiency": 0.64,
            "intra": 3e11,
            "inter": "25GB/s",
        },
    ],
)
def test_a_gpu_is_its_numbers(given_gpu):
    assert parse_gpu(given_gpu) == replace(GPUS["a100-80"], name="mine")


def test_a_gpu_of_the_catalog_can_be_changed():
    assert parse_gpu("h200") == GPUS["h200"]
    changed = parse_gpu("h200,efficiency=0.5,inter=100Gbit/s,inter_latency_us=20")
    assert (changed.efficiency, changed.flops, changed.inter_node) == (0.5, 989e12, Link(20, 12500.0))
    assert changed.intra_node == GPUS["h200"].intra_node


@pytest.mark.parametrize(
    ("given_model", "message"),
    [
        ("gpt5", "no model is called 'gpt5': choose from gpt3-medium, .*, or give layers, hidden, heads"),
        ("", "no model is called ''"),
        ("layers=24,hidden=1024", "the model 'custom' lacks heads"),
        ("layers=24,hidden=1024,heads=16,depth=3", "'depth' is not a key of a model: known are name, layers, hidden"),
        ({"layers": 24, "width": 3}, "'width' is not a key of a model"),
        ("layers=24,layers=25,hidden=1024,heads=16", "gives layers twice"),
        ("layers=24,hidden,heads=16", "'hidden' in the model .* is not key=value"),
        ("layers=many,hidden=1024,heads=16", "layers is 'many', but it must be a whole number"),
        ({"layers": 2.5, "hidden": 1024, "heads": 16}, "layers is 2.5, but it must be a whole number"),
        ({"layers": True, "hidden": 1024, "heads": 16}, "layers is True, but it must be a whole number"),
        ("layers=24,hidden=1024,heads=7", "7 heads do not divide the hidden size 1024"),
        ("layers=0,hidden=1024,heads=16", "num_layers is 0, but it must be a whole number from 1 to 10000"),
        ("layers=24,hidden=10000000,heads=16", "hidden is 10000000, but"),
        ("medium,microbatch=-1", "microbatch is -1, but"),
        ("70b", "'70b' may be any of llama-2-70b, llama-3-70b: give the whole name"),
        ("medium,family=bert", "family is 'bert', but it must be one of gpt, llama"),
        ("medium,kv_heads=4", "kv_heads belongs to models of family=llama: give that, too"),
        ("family=llama,layers=2,hidden=64,heads=4", "needs the width of its feed-forward: give ffn"),
        ("llama-3-8b,kv_heads=5", "5 kv_heads do not divide the 32 heads"),
        ("llama-3-8b,tied=perhaps", "tied is 'perhaps', but it must be yes or no"),
        ("llama-3-8b,top_k=2", "top_k is 2, but of 0 experts at least one"),
        ("mixtral-8x7b,top_k=9", "top_k is 9, but of 8 experts at least one and at most all"),
        ("mixtral-8x7b,top_k=0", "top_k is 0, but of 8 experts at least one"),
        ("llama-3-8b,shared_experts=1", "shared_experts is 1, but there are no experts"),
        ("llama-3-8b,experts=-1", "experts is -1, but it must be a whole number from 0 to"),
    ],
)
def test_a_model_that_makes_no_sense_is_refused_by_its_key(given_model, message):
    with pytest.raises(UserError, match=message):
        parse_model(given_model)


@pytest.mark.parametrize(
    ("given_gpu", "message"),
    [
        ("tpu", "no GPU is called 'tpu': choose from a100-40, a100-80, h100, .*, or give memory, tflops"),
        ("memory=80GiB,tflops=312", "the GPU 'custom' lacks hbm, efficiency, intra, inter"),
        ("h100,cores=3", "'cores' is not a key of a GPU: known are name, memory, tflops"),
        ("h100,memory=80 gigs", "memory is '80 gigs', but it must be a size, such as 80GiB"),
        ("h100,hbm=fast", "hbm is 'fast', but it must be a rate"),
        ("h100,inter=xGbit/s", "inter is 'x', but it must be a finite number"),
        ("h100,tflops=nan", "tflops is 'nan', but it must be a finite number"),
        ("h100,tflops=1e9", "flops is 1e.21 FLOP/s, but it must lie between"),
        ("h100,memory=80B", "memory_bytes is 80 bytes, but it must lie between"),
        ("h100,efficiency=64", "efficiency is 64.0, but it is a share of the peak"),
        ("h100,intra=0", "bytes_per_us is 0.0, but it must be a finite number above 0"),
        ("h100,inter_latency_us=-2", "latency_us is -2"),
    ],
)
def test_a_gpu_that_makes_no_sense_is_refused_by_its_key(given_gpu, message):
    with pytest.raises(UserError, match=message):
        parse_gpu(given_gpu)


@pytest.mark.parametrize(
    ("num_stages", "options", "message"),
    [
        (0, {}, "the number of stages is 0"),
        (2.0, {}, "the number of stages is 2.0"),
        (4, {}, "4 stages are more than the 3 layers of tiny"),
        (3, {"tensor_parallel": 0}, "tensor_parallel is 0"),
        (3, {"tensor_parallel": 4}, "a tensor-parallel degree of 4 does not divide the 10 heads of tiny"),
        (3, {"context_parallel": 0}, "context_parallel is 0"),
        (3, {"context_parallel": 3}, "a context-parallel degree of 3 does not divide the 1000 tokens of a sequence of tiny"),
        (3, {"gradient_bytes": 8}, "gradient_bytes is 8"),
        (3, {"split_overhead": 0}, "split_overhead is 0"),
        (2, {"layers": (1, 1)}, "the split 1, 1 does not give 3 layers to 2 stages"),
        (2, {"layers": (3, 0)}, "the split 3, 0 does not give 3 layers to 2 stages"),
        (2, {"layers": (1, 1, 1)}, "the split 1, 1, 1 does not give 3 layers to 2 stages"),
    ],
)
def test_what_cannot_be_estimated_is_refused(num_stages, options, message):
    with pytest.raises(UserError, match=message):
        estimate(TINY, PLAIN, num_stages, **options)


# Written before there were other families: the first is of the profile's JSON, the second of the layers' costs.
UNCHANGED = [
    ("gpt3-medium", "a100-80", 4, {}, "59af3fac9d912db8", "05f4bb66da1e131f"),
    ("gpt3-3.35b", "h100", 6, {"flash": False}, "68cf4f0e6fd072da", "feebb8c5ca44426c"),
    ("gpt3-6.7b", "a100-80", 8, {}, "0efe669f724db60b", "30b0075e257c03a0"),
    ("gpt-18.4b", "h200", 10, {"tensor_parallel": 6}, "e01fa1797f52733d", "ba438fdd9deee162"),
    (
        "gpt-39.1b,microbatch=3",
        "h100",
        7,
        {"tensor_parallel": 4, "sequence_parallel": False},
        "f4fd2f51289b0302",
        "78b33d1f07cf40a5",
    ),
    ("gpt-76.1b", "a100-80", 12, {"tensor_parallel": 5, "gradient_bytes": 2}, "60be2cac3cd2d368", "1dfd961e7396b07e"),
    ("gpt-145.6b", "h100", 16, {"tensor_parallel": 12, "split_overhead": 1.1}, "d813cb68a0409c6e", "15e099c67c6784dd"),
    (
        "layers=8,hidden=510,heads=6,sequence=511,vocabulary=30001",
        "h200",
        1,
        {"tensor_parallel": 3},
        "2ba46e67519e4be0",
        "6eaadb5666d678ed",
    ),
]


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize(("model", "gpu", "num_stages", "options", "profile", "costs"), UNCHANGED)
def test_estimates_of_gpt_models_are_what_they_were_bit_for_bit(model, gpu, num_stages, options, profile, costs):
    assert digest(json.dumps(estimate(model, gpu, num_stages, **options).to_json(), sort_keys=True)) == profile
    layers = layer_costs(parse_model(model), parse_gpu(gpu), options.get("tensor_parallel", 1))
    assert digest(repr([(one.forward_us, one.backward_us, one.num_parameters, one.activation_bytes) for one in layers])) == costs


# Queries 80 wide, keys and values 20, a feed-forward of 300; untied.
SLIM = replace(TINY, name="slim", family="llama", num_heads=8, kv_heads=2, head_dim=10, ffn=300)


def test_a_llama_layer_computes_with_fewer_keys_and_a_gated_feed_forward():
    stage = estimate(SLIM, PLAIN, 3).stages[1]
    # 1000 tokens: 2h (2q + 2k + 3f) = 2 * 100 * 1100 FLOPs each, and 4sq = 320,000 for attention.
    assert (stage.forward_us, stage.input_us, stage.weight_us) == (540, 860, 220)
    # Matrices of h (2q + 2k + 3f), and two norms.
    assert stage.gradient_bytes == 4 * (100 * 1100 + 200)
    # Two norms and two inputs 16h; queries and output 4q, keys and values 4k, fp32 sums 4 for each head, feed-forward 8f.
    assert stage.activation_bytes == 1000 * (16 * 100 + 4 * 80 + 4 * 20 + 4 * 8 + 8 * 300)
    # Inputs 4h + 2q + 2f, output gradients 2q + 4k + 4h + 4f.
    assert stage.weight_held_bytes == 1000 * (8 * 100 + 4 * 80 + 4 * 20 + 6 * 300)


def test_only_a_tied_head_on_the_worker_of_the_embedding_needs_no_matrix():
    own = 1000 * 100
    sizes = {
        (tied, num_stages): sum(stage.gradient_bytes for stage in estimate(replace(SLIM, tied=tied), PLAIN, num_stages).stages)
        / 4
        for tied in (True, False)
        for num_stages in (1, 3)
    }
    assert sizes[True, 1] == replace(SLIM, tied=True).num_parameters
    assert sizes[True, 3] == sizes[False, 3] == sizes[False, 1] == SLIM.num_parameters == sizes[True, 1] + own


def test_all_experts_are_in_memory_and_some_compute():
    dense, experts = (
        estimate(model, PLAIN, 3).stages[1] for model in (SLIM, replace(SLIM, experts=16, top_k=2, shared_experts=1))
    )
    # Two more feed-forwards (6hf each) and the router, 2hE.
    assert experts.forward_us - dense.forward_us == round(1000 * (2 * 6 * 100 * 300 + 2 * 100 * 16) / 1e6)
    assert experts.gradient_bytes - dense.gradient_bytes == 4 * (16 * 3 * 100 * 300 + 100 * 16)


def test_more_tensor_parallel_gpus_than_kv_heads_have_copies_of_them():
    four, eight = (estimate(SLIM, PLAIN, 3, tensor_parallel=t).stages[1] for t in (4, 8))
    # Of keys and values each GPU has one head of width 10, in either case; all else is shared by all GPUs.
    assert four.gradient_bytes == 4 * (100 * (2 * 80 + 3 * 300) + 200) / 4 + 4 * 2 * 100 * 10
    assert eight.gradient_bytes == 4 * (100 * (2 * 80 + 3 * 300) + 200) / 8 + 4 * 2 * 100 * 10
    with pytest.raises(UserError, match="a tensor-parallel degree of 4 neither divides the 6 kv_heads of odd nor is a multiple"):
        estimate(replace(SLIM, name="odd", num_heads=12, kv_heads=6), PLAIN, 3, tensor_parallel=4)


def test_context_parallel_gpus_divide_the_sequence_and_exchange_keys_and_values():
    link = Link(3, 1e3)
    whole, parts = (estimate(SLIM, replace(PLAIN, intra_node=link), 3, context_parallel=c).stages[1] for c in (1, 4))
    # Three steps, each with keys and values of 250 tokens in bf16, 2 * 2 * 20 bytes a token; backward with their gradients.
    ring_us = 3 * (3 + 250 * 80 / 1e3)
    assert parts.forward_us == round(whole.forward_us / 4 + ring_us)
    assert parts.input_us == round(whole.input_us / 4 + 2 * ring_us)
    assert parts.weight_us == whole.weight_us / 4
    assert (parts.activation_bytes, parts.weight_held_bytes) == (whole.activation_bytes / 4, whole.weight_held_bytes / 4)
    assert parts.output_bytes == whole.output_bytes / 4
    # Parameters are not divided, and gradients are summed before the step: 6 steps, 1.5 times their bytes.
    assert (parts.static_bytes, parts.gradient_bytes) == (whole.static_bytes, whole.gradient_bytes)
    assert parts.optimizer_us == pytest.approx(whole.optimizer_us + 6 * 3 + 1.5 * whole.gradient_bytes / 1e3, abs=2)


def test_a_worker_of_more_than_eight_gpus_exchanges_keys_and_values_over_the_network():
    gpu = replace(PLAIN, intra_node=Link(0, 1e12), inter_node=Link(1000, 1e3))
    inside, outside = (estimate(SLIM, gpu, 3, t, context_parallel=4).stages[1].forward_us for t in (2, 4))
    assert inside < 200
    assert outside > 3 * 1000


def test_the_name_of_an_estimate_says_its_degrees():
    assert estimate(SLIM, PLAIN, 3, 2, context_parallel=4).name == "estimate slim b=1 t=2 c=4 on plain"


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b"])
def test_the_layers_of_other_families_add_up_too(name):
    sums = LayerSums(estimate(name, H200, 4, layers=(8, 8, 8, 8)))
    for stage, (start, number) in zip(
        estimate(name, H200, 4, layers=(4, 10, 11, 7)).stages, ((0, 4), (4, 10), (14, 11), (25, 7)), strict=True
    ):
        assert sums.total("forward_us", range(start, start + number)) == pytest.approx(stage.forward_us, abs=3)
        assert sums.total("static_bytes", range(start, start + number)) == pytest.approx(stage.static_bytes, rel=1e-6)
