"""What a cluster is measured with: how many workers, what computes, and the GPT that they train."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import nn

from recycle.core.cluster import Shape
from recycle.core.errors import UserError
from recycle.core.plans.plan import Plan
from recycle.models.gpt import GptConfig, gpt_stages, next_byte_loss
from recycle.models.text import Text
from recycle.profiling.emulated_device import EmulatedDevice
from recycle.runtime.job import Job
from recycle.runtime.options import FailureOptions, TrainOptions

CPU_CORES, PACED_CORES, GPU_SLICES, EMULATED = "cpu-cores", "paced-cores", "gpu-slices", "emulated"
BACKENDS = (CPU_CORES, PACED_CORES, GPU_SLICES, EMULATED)
TECHNIQUES, ELASTIC = "techniques", "elastic"
STUDIES = (TECHNIQUES, ELASTIC)
"""What is compared: each technique beside torch's schedules; or re-routing beside cuts and moved layers."""
# What is not as it is by default.
_TINY = {"width": 16, "heads": 2, "context": 16, "samples": 1}
_USUAL: dict[str, dict[str, int]] = {CPU_CORES: {}, GPU_SLICES: {"width": 1024, "heads": 8, "context": 2048}, EMULATED: _TINY}
_SMALL = {
    CPU_CORES: {"width": 64, "context": 64, "samples": 2},
    GPU_SLICES: {"width": 256, "heads": 8, "context": 512},
}
# Layers enough to move some of them, and so small that two dozen micro-batches take seconds.
_ON_CORES = {"context": 128, "samples": 1}
_ELASTIC = {CPU_CORES: _ON_CORES, PACED_CORES: _ON_CORES, GPU_SLICES: {"context": 1024, "samples": 2}}
ELASTIC_LAYERS = 24
_LAYER_US = {
    # Long beside what a worker computes in truth, messages and sums, which take some ms of the machine's few cores.
    EMULATED: {"forward_us": 10_000, "input_us": 13_000, "weight_us": 9_000},
    # Longer than on a core of which another program has the second thread, at 45 % of the speed that a core has alone.
    PACED_CORES: {"forward_us": 5_500, "input_us": 5_500, "weight_us": 3_300},
}
_DEVICE = {EMULATED: "emulated device", PACED_CORES: "paced core"}
SEED = 1
# Low enough that rounding does not grow within a few steps: all variants must come to the same losses.
_RATE = 1e-4
_ENDLESS = 10**6
_NO_FAILURES = FailureOptions()


make_optimizer = partial(torch.optim.AdamW, lr=_RATE, fused=True)


@dataclass(frozen=True, slots=True)
class Setup:
    """A cluster and its model. On GPU slices all workers share one card, and weights and activations are bfloat16.

    Emulated devices run a model that is too small to matter, and each op lasts as long as on a device of the worker's own. Paced
    cores run the model of the cores, and each op lasts as long as on a slow core.
    """

    backend: str
    pipelines: int = 3
    stages: int = 4
    microbatches: int = 6
    width: int = 256
    layers: int = 8
    heads: int = 4
    context: int = 224
    samples: int = 3
    vocabulary: int = 256
    study: str = TECHNIQUES

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise UserError(f"the backend is {self.backend!r}, but it must be one of {', '.join(BACKENDS)}")
        if self.study not in STUDIES:
            raise UserError(f"the study is {self.study!r}, but it must be one of {', '.join(STUDIES)}")
        if self.backend in _LAYER_US and self.study != ELASTIC:
            raise UserError(f"torch's schedules do not run on {_DEVICE[self.backend]}s: give --study {ELASTIC}")
        for field in fields(self)[1:-1]:
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"{field.name} is {value!r}, but it must be a whole number of at least 1")
        if self.layers < 2 * self.stages:
            raise UserError(f"{self.layers} layers are too few for torch's zero bubble in a V: give at least {2 * self.stages}")
        if self.width % self.heads:
            raise UserError(f"{self.heads} heads do not share a width of {self.width}: choose a width that they divide")
        if self.vocabulary < 256:
            raise UserError(f"a vocabulary of {self.vocabulary} is too small for the bytes of a text: give at least 256")

    @staticmethod
    def usual(
        backend: str,
        num_workers: int = 12,
        is_small: bool = False,
        study: str = TECHNIQUES,
        microbatches: int | None = None,
    ) -> "Setup":
        """The sizes at which computing dominates: ops of 20 to 60 ms on a core, of 5 to 30 ms on a twelfth of an H200.

        Small ones are for machines on which workers share cores, or a GPU that is not an H200.
        """
        stages = 4
        if num_workers % stages or num_workers < 2 * stages:
            raise UserError(f"{num_workers} workers are no pipelines of {stages} stages: give a multiple of {stages}, at least 8")
        if is_small and backend in _LAYER_US:
            raise UserError(f"ops of {_DEVICE[backend]}s last a fixed time, whatever the model: leave out --small")
        sizes = dict(_USUAL.get(backend, {}))
        if study == ELASTIC:
            sizes |= {**_ELASTIC.get(backend, {}), "layers": ELASTIC_LAYERS}
        if is_small:
            sizes |= _SMALL.get(backend, {})
        if microbatches is not None:
            sizes["microbatches"] = microbatches
        return Setup(backend, num_workers // stages, study=study, **sizes)

    @property
    def is_small(self) -> bool:
        return self.backend in _SMALL and all(getattr(self, name) == size for name, size in _SMALL[self.backend].items())

    @property
    def is_gpu(self) -> bool:
        return self.backend == GPU_SLICES

    @property
    def emulated(self) -> EmulatedDevice | None:
        """The device of each worker, if it is emulated, or the pace of its core."""
        times = _LAYER_US.get(self.backend)
        return EmulatedDevice(**times, num_layers=self.layers // self.stages) if times else None

    @property
    def device(self) -> str:
        return "cuda" if self.is_gpu else "cpu"

    @property
    def shape(self) -> Shape:
        return Shape(self.pipelines, self.stages, self.microbatches)

    @property
    def num_workers(self) -> int:
        return self.pipelines * self.stages

    @property
    def model(self) -> str:
        precision = "bfloat16" if self.is_gpu else "float32"
        made = f"GPT of width {self.width}, {self.layers} layers, context {self.context}, {precision}"
        if (device := self.emulated) is None:
            return made
        times = device.forward_us, device.input_us, device.weight_us
        told = ", ".join(f"{us / 1000:g}" for us in times)
        return f"{made}; a layer takes {told} ms (F, I, W) of its worker's {_DEVICE[self.backend]}"

    def modules(self, num_stages: int | None = None, layers: Sequence[int] | None = None) -> list[nn.Module]:
        """The model in its stages, or in another number of them; `layers` are those of each stage, by default balanced ones."""
        config = GptConfig(self.vocabulary, self.context, self.width, self.heads, self.layers)
        made = gpt_stages(config, num_stages or self.stages, SEED, layers)
        return [module.to(torch.bfloat16) for module in made] if self.is_gpu else made

    def text(self) -> Text:
        return Text(self.context)

    def job(self, plan: Plan, steps: int = _ENDLESS, failures: FailureOptions = _NO_FAILURES) -> Job:
        """The training job, by a plan of any shape; if the plan knows its layers, its stages have as many."""
        # A GPU has memory for copies of so small states, and no idle time in which a step could be computed again.
        options = TrainOptions(SEED, device=self.device, failures=failures, lean_steps=False)
        modules = self.modules(layers=layers_of_stages(plan))
        return Job(plan, modules, self.text(), next_byte_loss, make_optimizer, steps, self.samples, options=options)


def layers_of_stages(plan: Plan) -> tuple[int, ...] | None:
    """The number of layers of each stage of a plan, if it knows them."""
    return tuple(map(len, plan.problem.profile.layers)) or None
