"""The catalog of models and GPUs by name, and the text and dictionary forms of others.

`estimate` computes the costs. A model is the decoder-only transformer of the GPT papers; a GPU is its data sheet, plus one number
that a data sheet does not have: the share of the peak that matrix products reach.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from recycle.core.errors import UserError
from recycle.core.profile import Link
from recycle.core.units import is_bytes, parse_bytes

_Number = TypeVar("_Number", int, float)
# The upper limits of a model's numbers are far above any model; a value beyond them is a typing error.
_MOST = {"num_layers": 10**4, "hidden": 10**6, "num_heads": 10**5, "sequence": 10**8, "vocabulary": 10**8, "microbatch": 10**5}
# From a microcontroller to a thousand of today's fastest GPUs; beyond that a unit is wrong.
_GPU_RANGES = {
    "memory_bytes": (2**20, 2**50, "bytes"),
    "flops": (1e9, 1e18, "FLOP/s"),
    "hbm_bytes_per_s": (1e8, 1e16, "bytes/s"),
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a GPT; `microbatch` is the number of samples in one micro-batch."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    sequence: int = 2048
    vocabulary: int = 51200
    microbatch: int = 1

    def __post_init__(self) -> None:
        for field, most in _MOST.items():
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise UserError(f"model {self.name}: {field} is {value!r}, but it must be a whole number from 1 to {most}")
        if self.hidden % self.num_heads:
            raise UserError(
                f"model {self.name}: {self.num_heads} heads do not divide the hidden size {self.hidden}: "
                "choose a number of heads that does"
            )

    @property
    def layer_parameters(self) -> int:
        """Weights, biases and norms of one transformer layer: 12 h^2 + 13 h."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def num_parameters(self) -> int:
        """12 L h^2 (1 + 13/(12h) + (V+s)/(12Lh)), as in the Megatron-LM papers: embedding and head share one matrix."""
        return self.num_layers * self.layer_parameters + (self.vocabulary + self.sequence) * self.hidden


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """The data sheet of a GPU and of its two links, each counted in one direction and for one GPU.

    `flops` is the dense bf16 peak. `efficiency` is the share of it that matrix products reach while they run; it is
    not the MFU of a training run, which also pays for bubbles, communication and element-wise work.
    """

    name: str
    memory_bytes: int
    flops: float
    hbm_bytes_per_s: float
    efficiency: float
    intra_node: Link
    inter_node: Link

    def __post_init__(self) -> None:
        for field, (least, most, unit) in _GPU_RANGES.items():
            if not least <= (value := getattr(self, field)) <= most:
                between = f"it must lie between {least:g} and {most:g}: check its unit"
                raise UserError(f"GPU {self.name}: {field} is {value!r} {unit}, but {between}")
        if not 0.01 <= self.efficiency <= 1:
            raise UserError(
                f"GPU {self.name}: efficiency is {self.efficiency!r}, but it is a share of the peak: 0.01 to 1, such as 0.6"
            )


# Medium and 6.7b are the shapes of the GPT-3 paper (table 2.1); 3.35b is the closest reading of the ReCycle paper; the
# others are rows of table 1 of "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM".
# Sequence 2048 and vocabulary 51200 are that paper's.
MODELS = {
    model.name: model
    for model in (
        ModelSpec("gpt3-medium", num_layers=24, hidden=1024, num_heads=16),
        ModelSpec("gpt3-3.35b", num_layers=30, hidden=3072, num_heads=32),
        ModelSpec("gpt3-6.7b", num_layers=32, hidden=4096, num_heads=32),
        ModelSpec("gpt-18.4b", num_layers=40, hidden=6144, num_heads=48),
        ModelSpec("gpt-39.1b", num_layers=48, hidden=8192, num_heads=64),
        ModelSpec("gpt-76.1b", num_layers=60, hidden=10240, num_heads=80),
        ModelSpec("gpt-145.6b", num_layers=80, hidden=12288, num_heads=96),
    )
}

# Latencies are assumptions, not data-sheet values: about what one NCCL step costs inside a server and between servers.
_STEP_IN_SERVER_US, _STEP_BETWEEN_SERVERS_US = 2, 10


def _links(nvlink_gb_per_s: float, network_gbit_per_s: float) -> dict[str, Link]:
    """A GPU's links: NVLink in one direction, and its own network card (DGX servers have one for each GPU)."""
    return {
        "intra_node": Link(_STEP_IN_SERVER_US, nvlink_gb_per_s * 1e9 / 1e6),
        "inter_node": Link(_STEP_BETWEEN_SERVERS_US, network_gbit_per_s * 1e9 / 8 / 1e6),
    }


# NVIDIA data sheets of A100 (SXM, 80 GB), H100 (SXM5) and H200 (SXM): dense bf16 without sparsity; networks of DGX A100
# (200 Gbit/s a GPU) and DGX H100 and H200 (400 Gbit/s). Memory is the sheet's decimal gigabytes: the few per cent that a
# device has above them are left to the CUDA context and to fragmentation. Efficiency 0.64 fits the stage times that we
# measured on an H200 (tests/planner/test_estimate.py says how well); for the others it is an assumption.
GPUS = {
    gpu.name: gpu
    for gpu in (
        GpuSpec("a100-80", 80 * 10**9, 312e12, 2.039e12, 0.64, **_links(300, 200)),
        GpuSpec("h100", 80 * 10**9, 989e12, 3.35e12, 0.64, **_links(450, 400)),
        GpuSpec("h200", 141 * 10**9, 989e12, 4.8e12, 0.64, **_links(450, 400)),
    )
}


def parse_model(given: str | Mapping[str, Any]) -> ModelSpec:
    """Return the model of a text or dictionary.

    A text is a name (`gpt3-6.7b`, or `6.7b`), a name with changes (`gpt3-6.7b,microbatch=2`), or all of it
    (`layers=24,hidden=1024,heads=16`). A dictionary, such as a table of a TOML file, has the same keys and `name`.
    """
    optional = ("sequence", "vocabulary", "microbatch")
    known, name, fields = _parse(given, "model", MODELS, _MODEL_KEYS, optional)
    return replace(known, name=name, **fields) if known else ModelSpec(name, **fields)


def parse_gpu(given: str | Mapping[str, Any]) -> GpuSpec:
    """Return the GPU of a text or dictionary: a name, a name with changes, or all of it.

    `memory=80GiB,tflops=312,hbm=2039GB/s,efficiency=0.6,intra=300GB/s,inter=200Gbit/s`; `intra_latency_us` and
    `inter_latency_us` change the latencies. A bare number for a rate is bytes a second, for memory it is bytes.
    """
    known, name, fields = _parse(given, "GPU", GPUS, _GPU_KEYS, optional=("intra_latency_us", "inter_latency_us"))
    for side in ("intra", "inter"):
        fields[f"{side}_node"] = _link(side, fields, getattr(known, f"{side}_node") if known else None)
    return replace(known, name=name, **fields) if known else GpuSpec(name, **fields)


_Spec = TypeVar("_Spec", ModelSpec, GpuSpec)
_Keys = Mapping[str, tuple[str, Callable[[str, Any], Any]]]  # the field of each key, and the reader of its value


def _parse(
    given: str | Mapping[str, Any], noun: str, catalog: Mapping[str, _Spec], keys: _Keys, optional: tuple[str, ...]
) -> tuple[_Spec | None, str, dict[str, Any]]:
    """Return the entry of the catalog that is named, if any, the name, and the fields that are given."""
    values = _pairs(given, noun)
    known = _known(catalog, values)
    name = str(values.pop("name", "custom"))
    if unknown := [str(key) for key in values if key not in keys]:
        raise UserError(f"{unknown[0]!r} is not a key of a {noun}: known are name, {', '.join(keys)}")
    fields = {keys[key][0]: keys[key][1](key, value) for key, value in values.items()}
    if known:
        return known, _changed(known.name, values), fields
    missing = [key for key in keys if key not in values and key not in optional]
    if missing and not fields:
        raise UserError(f"no {noun} is called {name!r}: choose from {', '.join(catalog)}, or give {', '.join(missing)}")
    if missing:
        raise UserError(f"the {noun} {name!r} lacks {', '.join(missing)}: give them, or start from one of {', '.join(catalog)}")
    return None, name, fields


def _link(side: str, fields: dict[str, Any], known: Link | None) -> Link:
    """Take the fields of one link out of `fields`, and make the link."""
    default = known or Link(_STEP_IN_SERVER_US if side == "intra" else _STEP_BETWEEN_SERVERS_US)
    bytes_per_s = fields.pop(f"{side}_bytes_per_s", default.bytes_per_us * 1e6)
    return Link(fields.pop(f"{side}_latency_us", default.latency_us), bytes_per_s / 1e6)


def _pairs(given: str | Mapping[str, Any], noun: str) -> dict[str, Any]:
    """Return the keys and values of a text or dictionary; a leading word without `=` is the name."""
    if not isinstance(given, str):
        return dict(given)
    values: dict[str, Any] = {}
    for position, part in enumerate(given.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if position == 0 and not equals:
            key, value = "name", key
        elif not (key and equals and value):
            raise UserError(f"{part.strip()!r} in the {noun} {given!r} is not key=value: write such as layers=24,hidden=1024")
        if key in values:
            raise UserError(f"the {noun} {given!r} gives {key} twice: give it once")
        values[key] = value
    return values


def _known(catalog: Mapping[str, _Spec], values: Mapping[str, Any]) -> _Spec | None:
    """Return the entry of the catalog whose name, or whose name's last part, is given."""
    asked = str(values.get("name", "")).lower()
    found = [spec for name, spec in catalog.items() if asked and (name == asked or name.endswith(f"-{asked}"))]
    return found[0] if found else None


def _changed(name: str, values: Mapping[str, Any]) -> str:
    """Return a name with the changed values; the micro-batch is not part of a model's name."""
    return " ".join([name, *(f"{key}={value}" for key, value in values.items() if key != "microbatch")])


def _count(key: str, value: Any) -> int:
    return _number(key, value, int, "a whole number, such as 24")


def _real(key: str, value: Any) -> float:
    return _number(key, value, float, "a finite number")


def _number(key: str, value: Any, kind: Callable[[Any], _Number], example: str) -> _Number:
    try:
        number = kind(value)
        if isinstance(value, bool) or (not isinstance(value, str) and number != value) or not math.isfinite(number):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{key} is {value!r}, but it must be {example}") from None
    return number


def _bytes(key: str, value: Any) -> int:
    return parse_bytes(value) if isinstance(value, str) and is_bytes(value) else _number(key, value, int, "a size, such as 80GiB")


def _rate(key: str, value: Any) -> float:
    """Bytes a second from `300GB/s`, `200Gbit/s` or a bare number."""
    text = value.strip().removesuffix("/s") if isinstance(value, str) else ""
    if text.endswith("Gbit"):
        return _real(key, text.removesuffix("Gbit")) * 1e9 / 8
    return float(parse_bytes(text)) if is_bytes(text) else _number(key, value, float, "a rate, such as 300GB/s or 200Gbit/s")


_MODEL_KEYS: _Keys = {field.removeprefix("num_"): (field, _count) for field in _MOST}
_GPU_KEYS: _Keys = {
    "memory": ("memory_bytes", _bytes),
    "tflops": ("flops", lambda key, value: _real(key, value) * 1e12),
    "hbm": ("hbm_bytes_per_s", _rate),
    "efficiency": ("efficiency", _real),
    "intra": ("intra_bytes_per_s", _rate),
    "inter": ("inter_bytes_per_s", _rate),
    "intra_latency_us": ("intra_latency_us", _count),
    "inter_latency_us": ("inter_latency_us", _count),
}
