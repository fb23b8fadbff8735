"""The page of models and GPUs says what the catalog says."""

from pathlib import Path

import pytest

from recycle.planner.profiles.catalog import GPUS, MODELS

PAGE = (Path(__file__).parents[2] / "docs/reference/models.md").read_text(encoding="utf-8")


def cells(name):
    """The cells of the row that begins with `name`."""
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{name}` | ") and line.count("|") > 5)
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_page_has_the_numbers_of_a_model(model):
    layers, hidden, heads, head_dim, ffn, vocabulary, sequence, experts, parameters = cells(model.name)
    shown = [layers, hidden, head_dim, ffn, vocabulary, sequence]
    width = model.ffn or 4 * model.hidden
    assert [int(cell) for cell in shown] == [
        model.num_layers,
        model.hidden,
        model.head_width,
        width,
        model.vocabulary,
        model.sequence,
    ]
    assert heads == f"{model.num_heads} / {model.num_kv_heads}"
    assert experts.startswith(f"{model.top_k} of {model.experts}") if model.experts else not experts
    assert float(parameters.split()[0]) == pytest.approx(model.num_parameters / 1e9, rel=0.005)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_the_page_has_the_numbers_of_a_gpu(gpu):
    memory, tflops, bandwidth, intra, inter = (float(cell.split()[0]) for cell in cells(gpu.name))
    assert (memory * 1e9, tflops * 1e12) == (gpu.memory_bytes, gpu.flops)
    assert bandwidth * 1e9 == gpu.hbm_bytes_per_s
    assert (intra * 1e3, inter * 1e3 / 8) == (gpu.intra_node.bytes_per_us, gpu.inter_node.bytes_per_us)
