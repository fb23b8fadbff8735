"""The catalog of models and GPUs by name, and the text and dictionary forms of others.

`estimate` computes the costs. A model is a decoder-only transformer of one of two families; a GPU is its data sheet, plus one
number that a data sheet does not have: the share of the peak that matrix products reach.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from recycle.core.errors import UserError
from recycle.core.profile import Link
from recycle.planner.profiles.spec_text import SpecKeys, read_bytes, read_count, read_flag, read_rate, read_real, read_spec

FAMILIES = ("gpt", "llama")
# The upper limits of a model's numbers are far above any model; a value beyond them is a typing error.
_MODEL_RANGES = {
    "num_layers": (1, 10**4),
    "hidden": (1, 10**6),
    "num_heads": (1, 10**5),
    "sequence": (1, 10**8),
    "vocabulary": (1, 10**8),
    "microbatch": (1, 10**5),
    "kv_heads": (1, 10**5),
    "head_dim": (1, 10**5),
    "ffn": (1, 10**7),
    "experts": (0, 10**5),
    "top_k": (0, 10**5),
    "shared_experts": (0, 10**4),
}
_MAY_BE_NONE = ("kv_heads", "head_dim", "ffn")
_LLAMA_FIELDS = (*_MAY_BE_NONE, "experts", "top_k", "shared_experts")
# From a microcontroller to a thousand of today's fastest GPUs; beyond that a unit is wrong.
_GPU_RANGES = {
    "memory_bytes": (2**20, 2**50, "bytes"),
    "flops": (1e9, 1e18, "FLOP/s"),
    "hbm_bytes_per_s": (1e8, 1e16, "bytes/s"),
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder-only transformer; `microbatch` is the number of samples in one micro-batch.

    The family `gpt` is the transformer of the GPT papers: learned positions, norms and linear layers with biases, a feed-forward
    of 4h, dropout. The family `llama` has RMSNorm, rotary positions, a gated feed-forward (SwiGLU) and no biases; all fields
    after `family` belong to it, except `tied`.

    Args:
        kv_heads: Heads of keys and values (grouped-query attention). None: as many as heads.
        head_dim: Size of a head. None: hidden size / heads.
        ffn: Width of the feed-forward, or of one expert.
        tied: Whether the embedding and the head are one matrix. None: as usual in the family, gpt yes, llama no.
        experts: Experts of each layer (mixture of experts), all in memory. 0: a dense model.
        top_k: Experts that compute each token.
        shared_experts: Experts that compute all tokens, beside the others and as wide as they are.
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    sequence: int = 2048
    vocabulary: int = 51200
    microbatch: int = 1
    family: str = "gpt"
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    tied: bool | None = None
    experts: int = 0
    top_k: int = 0
    shared_experts: int = 0

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise UserError(f"model {self.name}: family is {self.family!r}, but it must be one of {', '.join(FAMILIES)}")
        for field, (least, most) in _MODEL_RANGES.items():
            value = getattr(self, field)
            if field in _MAY_BE_NONE and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise UserError(f"model {self.name}: {field} is {value!r}, but it must be a whole number from {least} to {most}")
        self._refuse_bad_heads()
        self._refuse_bad_feed_forward()

    def _refuse_bad_heads(self) -> None:
        if self.head_dim is None and self.hidden % self.num_heads:
            raise UserError(
                f"model {self.name}: {self.num_heads} heads do not divide the hidden size {self.hidden}: "
                "choose a number of heads that does"
            )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model {self.name}: {self.kv_heads} kv_heads do not divide the {self.num_heads} heads: "
                "each of them serves the same number of heads"
            )

    def _refuse_bad_feed_forward(self) -> None:
        if self.family == "gpt":
            if given := [field for field in _LLAMA_FIELDS if getattr(self, field)]:
                raise UserError(f"model {self.name}: {given[0]} belongs to models of family=llama: give that, too")
        elif self.ffn is None:
            raise UserError(
                f"model {self.name}: a model of family=llama needs the width of its feed-forward: give ffn, such as 14336"
            )
        if self.top_k > self.experts or (self.experts and not self.top_k):
            raise UserError(
                f"model {self.name}: top_k is {self.top_k}, but of {self.experts} experts at least one and at most all "
                "compute a token"
            )
        if self.shared_experts and not self.experts:
            raise UserError(
                f"model {self.name}: shared_experts is {self.shared_experts}, but there are no experts: give experts, too"
            )

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        return self.hidden // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def ffn_width(self) -> int:
        """The width of the feed-forward that a token passes: of a dense one, or of all experts that compute it."""
        width = 4 * self.hidden if self.ffn is None else self.ffn
        return width * (self.top_k + self.shared_experts) if self.experts else width

    @property
    def shares_embedding(self) -> bool:
        """Whether the embedding and the head are one matrix."""
        return self.family == "gpt" if self.tied is None else self.tied

    @property
    def layer_parameters(self) -> int:
        """Weights, biases and norms of one transformer layer, with all its experts. For the family gpt: 12 h^2 + 13 h."""
        if self.family == "gpt":
            return 12 * self.hidden**2 + 13 * self.hidden
        idle = self.experts - self.top_k if self.experts else 0
        return self.active_layer_parameters + 3 * self.hidden * (self.ffn or 0) * idle

    @property
    def active_layer_parameters(self) -> int:
        """The parameters of a layer that take part in the computation of one token."""
        if self.family == "gpt":
            return self.layer_parameters
        attention = 2 * self.hidden * self.head_width * (self.num_heads + self.num_kv_heads)
        router, norms = self.hidden * self.experts, 2 * self.hidden
        return attention + 3 * self.hidden * self.ffn_width + router + norms

    @property
    def num_parameters(self) -> int:
        """All parameters. For the family gpt 12 L h^2 (1 + 13/(12h) + (V+s)/(12Lh)), as in the Megatron-LM papers."""
        return self.num_layers * self.layer_parameters + self._outer_parameters

    @property
    def num_active_parameters(self) -> int:
        """The parameters that one token uses: all, unless the model has experts."""
        return self.num_layers * self.active_layer_parameters + self._outer_parameters

    @property
    def embedding_parameters(self) -> int:
        """The embedding of tokens and, in the family gpt, of positions."""
        return (self.vocabulary + (self.sequence if self.family == "gpt" else 0)) * self.hidden

    @property
    def _outer_parameters(self) -> int:
        """Embedding, head and, in the family llama, the norm before the head."""
        head = 0 if self.shares_embedding else self.vocabulary * self.hidden
        return self.embedding_parameters + head + (self.hidden if self.family == "llama" else 0)


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


def _llama(
    name: str, num_layers: int, hidden: int, num_heads: int, kv_heads: int, ffn: int, vocabulary: int, sequence: int
) -> ModelSpec:
    return ModelSpec(name, num_layers, hidden, num_heads, sequence, vocabulary, family="llama", kv_heads=kv_heads, ffn=ffn)


# Medium and 6.7b are the shapes of the GPT-3 paper (table 2.1); 3.35b is the closest reading of the ReCycle paper; the
# others are rows of table 1 of "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM".
# Sequence 2048 and vocabulary 51200 are that paper's. Llama 2: table 1 of its paper and the published configurations. Llama 3
# and 3.1: table 3 of "The Llama 3 Herd of Models"; they were trained with 8192 tokens before their context was made longer. The
# others: the published configurations (config.json), with 8192 tokens. The shared expert of Qwen1.5-MoE is as wide as four of its
# routed ones. The sliding window of Mistral is left out, like every mask.
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
        _llama("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, 4096),
        _llama("llama-2-13b", 40, 5120, 40, 40, 13824, 32000, 4096),
        _llama("llama-2-70b", 80, 8192, 64, 8, 28672, 32000, 4096),
        _llama("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, 8192),
        _llama("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, 8192),
        _llama("llama-3.1-405b", 126, 16384, 128, 8, 53248, 128256, 8192),
        replace(_llama("llama-3.2-1b", 16, 2048, 32, 8, 8192, 128256, 8192), tied=True),
        replace(_llama("llama-3.2-3b", 28, 3072, 24, 8, 8192, 128256, 8192), tied=True),
        _llama("mistral-7b", 32, 4096, 32, 8, 14336, 32000, 8192),
        replace(_llama("mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, 8192), experts=8, top_k=2),
        replace(_llama("qwen3-30b-a3b", 48, 2048, 32, 4, 768, 151936, 8192), head_dim=128, experts=128, top_k=8),
        replace(_llama("qwen1.5-moe-a2.7b", 24, 2048, 16, 16, 1408, 151936, 8192), experts=60, top_k=4, shared_experts=4),
    )
}

# Latencies are assumptions, not data-sheet values: about what one NCCL step costs inside a server and between servers.
_STEP_IN_SERVER_US, _STEP_BETWEEN_SERVERS_US = 2, 10


def _links(intra_gb_per_s: float, network_gbit_per_s: float) -> dict[str, Link]:
    """A GPU's links: to the GPUs of its server in one direction, and its own network card (DGX servers have one for each GPU)."""
    return {
        "intra_node": Link(_STEP_IN_SERVER_US, intra_gb_per_s * 1e9 / 1e6),
        "inter_node": Link(_STEP_BETWEEN_SERVERS_US, network_gbit_per_s * 1e9 / 8 / 1e6),
    }


# NVIDIA data sheets of A100 (SXM, 40 and 80 GB), H100 (SXM5), H200 (SXM), B200 (of DGX B200: 1,440 GB and 64 TB/s for 8 GPUs)
# and L40S: dense bf16 without sparsity; networks of DGX A100 (200 Gbit/s a GPU) and of DGX H100, H200 and B200 (400 Gbit/s). L40S
# has PCIe 4.0 x16 (64 GB/s in both directions together) instead of NVLink; its network is our assumption: a card of 200 Gbit/s
# for two GPUs. AMD data sheet of MI300X: 7 links of Infinity Fabric, each 128 GB/s in both directions together; its network is
# our assumption: 400 Gbit/s a GPU. Memory is the sheet's decimal gigabytes: the few per cent that a device has above them are
# left to the CUDA context and to fragmentation. Efficiency 0.64 fits the stage times that we measured on an H200 (tests/planner/profiles/test_estimate.py says how well); for the others it is an assumption.
GPUS = {
    gpu.name: gpu
    for gpu in (
        GpuSpec("a100-40", 40 * 10**9, 312e12, 1.555e12, 0.64, **_links(300, 200)),
        GpuSpec("a100-80", 80 * 10**9, 312e12, 2.039e12, 0.64, **_links(300, 200)),
        GpuSpec("h100", 80 * 10**9, 989e12, 3.35e12, 0.64, **_links(450, 400)),
        GpuSpec("h200", 141 * 10**9, 989e12, 4.8e12, 0.64, **_links(450, 400)),
        GpuSpec("b200", 180 * 10**9, 2250e12, 8e12, 0.64, **_links(900, 400)),
        GpuSpec("l40s", 48 * 10**9, 362.05e12, 0.864e12, 0.64, **_links(32, 100)),
        GpuSpec("mi300x", 192 * 10**9, 1307.4e12, 5.325e12, 0.64, **_links(448, 400)),
    )
}


def parse_model(given: str | Mapping[str, Any]) -> ModelSpec:
    """Return the model of a text or dictionary.

    A text is a name (`gpt3-6.7b`, or `6.7b`), a name with changes (`llama-3-8b,microbatch=2`), or all of it
    (`layers=24,hidden=1024,heads=16`, `family=llama,layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocabulary=128256`).
    A dictionary, such as a table of a TOML file, has the same keys and `name`.
    """
    optional = tuple(key for key in _MODEL_KEYS if key not in ("layers", "hidden", "heads"))
    known, name, fields = read_spec(given, "model", MODELS, _MODEL_KEYS, optional)
    return replace(known, name=name, **fields) if known else ModelSpec(name, **fields)


def parse_gpu(given: str | Mapping[str, Any]) -> GpuSpec:
    """Return the GPU of a text or dictionary: a name, a name with changes, or all of it.

    `memory=80GiB,tflops=312,hbm=2039GB/s,efficiency=0.6,intra=300GB/s,inter=200Gbit/s`; `intra_latency_us` and
    `inter_latency_us` change the latencies. A bare number for a rate is bytes a second, for memory it is bytes.
    """
    known, name, fields = read_spec(given, "GPU", GPUS, _GPU_KEYS, optional=("intra_latency_us", "inter_latency_us"))
    for side in ("intra", "inter"):
        fields[f"{side}_node"] = _link(side, fields, getattr(known, f"{side}_node") if known else None)
    return replace(known, name=name, **fields) if known else GpuSpec(name, **fields)


def _link(side: str, fields: dict[str, Any], known: Link | None) -> Link:
    """Take the fields of one link out of `fields`, and make the link."""
    default = known or Link(_STEP_IN_SERVER_US if side == "intra" else _STEP_BETWEEN_SERVERS_US)
    bytes_per_s = fields.pop(f"{side}_bytes_per_s", default.bytes_per_us * 1e6)
    return Link(fields.pop(f"{side}_latency_us", default.latency_us), bytes_per_s / 1e6)


_MODEL_KEYS: SpecKeys = {
    **{field.removeprefix("num_"): (field, read_count) for field in _MODEL_RANGES},
    "family": ("family", lambda _, value: str(value).lower()),
    "tied": ("tied", read_flag),
}
_GPU_KEYS: SpecKeys = {
    "memory": ("memory_bytes", read_bytes),
    "tflops": ("flops", lambda key, value: read_real(key, value) * 1e12),
    "hbm": ("hbm_bytes_per_s", read_rate),
    "efficiency": ("efficiency", read_real),
    "intra": ("intra_bytes_per_s", read_rate),
    "inter": ("inter_bytes_per_s", read_rate),
    "intra_latency_us": ("intra_latency_us", read_count),
    "inter_latency_us": ("inter_latency_us", read_count),
}
