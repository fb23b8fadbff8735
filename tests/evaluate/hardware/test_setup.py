"""What is measured: the usual sizes, what follows from them, and what cannot be measured."""

import re
from dataclasses import asdict, replace

import pytest
import torch

from recycle.core.cluster import Shape
from recycle.core.errors import UserError
from recycle.evaluate.hardware.setup import BACKENDS, CPU_CORES, ELASTIC, EMULATED, GPU_SLICES, PACED_CORES, Setup
from recycle.profiling.emulated_device import EmulatedDevice
from tests.evaluate.hardware.tiny_setup import TINY


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_workers", "pipelines"), [(8, 2), (12, 3), (16, 4)])
def test_the_usual_workers_stand_in_pipelines_of_four_stages(backend, num_workers, pipelines):
    setup = Setup.usual(backend, num_workers, study=ELASTIC)
    assert setup.shape == Shape(pipelines, 4, 6)
    assert setup.num_workers == num_workers


def test_twelve_workers_are_usual():
    assert Setup.usual("cpu-cores") == Setup.usual("cpu-cores", 12) == Setup("cpu-cores")


def test_a_slice_of_a_gpu_has_the_larger_model_and_half_the_precision():
    core, gpu = Setup.usual("cpu-cores"), Setup.usual("gpu-slices")
    assert (core.device, core.is_gpu, gpu.device, gpu.is_gpu) == ("cpu", False, "cuda", True)
    assert core.model == "GPT of width 256, 8 layers, context 224, float32"
    assert gpu.model == "GPT of width 1024, 8 layers, context 2048, bfloat16"
    assert gpu.shape == core.shape


@pytest.mark.parametrize("backend", [CPU_CORES, GPU_SLICES])
def test_a_small_one_is_of_the_same_shape_and_computes_less(backend):
    usual, small = Setup.usual(backend), Setup.usual(backend, is_small=True)
    assert (usual.is_small, small.is_small) == (False, True)
    assert (small.shape, small.layers) == (usual.shape, usual.layers)
    assert small.width * small.context * small.samples <= usual.width * usual.context * usual.samples / 10


@pytest.mark.parametrize("num_workers", [0, 4, 7, 9, 10, 13, -8])
def test_workers_that_do_not_fill_two_pipelines_are_refused(num_workers):
    with pytest.raises(
        UserError, match=f"^{num_workers} workers are no pipelines of 4 stages: give a multiple of 4, at least 8$"
    ):
        Setup.usual("cpu-cores", num_workers)


@pytest.mark.parametrize("backend", ["gpu", "", "CPU-cores", None])
def test_a_backend_that_nobody_knows_is_refused_with_those_that_there_are(backend):
    sentence = f"the backend is {backend!r}, but it must be one of cpu-cores, paced-cores, gpu-slices, emulated"
    for make in (Setup.usual, Setup):
        with pytest.raises(UserError, match=f"^{re.escape(sentence)}$"):
            make(backend)


@pytest.mark.parametrize("name", ["pipelines", "stages", "microbatches", "width", "layers", "heads", "context", "samples"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True, None])
def test_a_size_that_is_no_count_is_refused_by_its_name(name, value):
    with pytest.raises(UserError, match=f"^{name} is {value!r}, but it must be a whole number of at least 1$"):
        replace(TINY, **{name: value})


def test_a_sample_is_as_long_as_the_context():
    inputs, targets = TINY.text()[0]
    assert inputs.shape == targets.shape == (TINY.context,)


def test_the_model_is_the_same_however_many_stages_it_has():
    two, four = all_weights(TINY.modules()), all_weights(TINY.modules(4))
    assert two.keys() == four.keys()
    assert all(torch.equal(two[name], four[name]) for name in two)


def all_weights(stages):
    """Those of the whole model: a parameter has the same name wherever the cut is."""
    return {name: value for stage in stages for name, value in stage.state_dict().items()}


def test_it_is_the_same_setup_after_a_journey_through_json():
    assert Setup(**asdict(TINY)) == TINY


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": 3}, r"^3 layers are too few for torch's zero bubble in a V: give at least 4$"),
        ({"heads": 3}, r"^3 heads do not share a width of 16: choose a width that they divide$"),
    ],
)
def test_a_model_that_not_all_variants_can_train_is_refused_at_once(changed, message):
    with pytest.raises(UserError, match=message):
        replace(TINY, **changed)


@pytest.mark.parametrize(("backend", "device"), [(EMULATED, "emulated device"), (PACED_CORES, "paced core")])
def test_devices_of_a_fixed_speed_run_our_plans_only(backend: str, device: str) -> None:
    with pytest.raises(UserError, match=f"^torch's schedules do not run on {device}s: give --study elastic$"):
        Setup.usual(backend)
    with pytest.raises(UserError, match=f"^ops of {device}s last a fixed time, whatever the model: leave out --small$"):
        Setup.usual(backend, is_small=True, study=ELASTIC)
    assert re.search(
        rf"float32; a layer takes [\d., ]+ ms \(F, I, W\) of its worker's {device}$", Setup.usual(backend, study=ELASTIC).model
    )


def test_paced_cores_compute_what_other_cores_compute_and_the_layers_of_a_stage_have_their_times() -> None:
    free, paced = Setup.usual(CPU_CORES, study=ELASTIC), Setup.usual(PACED_CORES, study=ELASTIC)
    assert replace(paced, backend=CPU_CORES) == free
    assert paced.model.startswith(f"{free.model}; a layer takes 5.5, 5.5, 3.3 ms")
    assert (free.emulated, paced.emulated) == (None, EmulatedDevice(5_500, 5_500, 3_300, num_layers=6))
