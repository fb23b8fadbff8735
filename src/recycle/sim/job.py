"""SimulatedJob: the model, the GPUs and the shape of a simulated training job, the same for every system."""

from dataclasses import dataclass
from functools import lru_cache

from recycle.core.cluster import Cluster, Shape
from recycle.core.errors import MemoryTooSmall, UserError
from recycle.core.problem import Memory, Problem, Techniques
from recycle.core.profile import Profile
from recycle.planner.profiles.catalog import GpuSpec, ModelSpec, parse_gpu, parse_model
from recycle.planner.profiles.estimate import LayerCost, estimate, layer_costs
from recycle.sim.measured_model import MeasuredDevice, MeasuredModel, measured
from recycle.sim.model_layers import spread_layers

COPIED_BYTES_PER_PARAMETER = 14  # bf16 weight, fp32 master weight and Adam's two moments; gradients are not copied
BYTES_PER_PARAMETER = 18  # bf16 weight, fp32 gradient, fp32 master weight and Adam's two moments


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """A model in a shape. A worker is a node of `tensor_parallel` x `context_parallel` GPUs, and fails as a unit.

    Its costs are estimated from a model and a GPU, or measured. `scale` multiplies estimated times, so that the fault-free job is
    as fast as a measured one.
    """

    model: ModelSpec | MeasuredModel
    gpu: GpuSpec | MeasuredDevice
    shape: Shape
    tensor_parallel: int = 1
    scale: float = 1.0
    context_parallel: int = 1

    @staticmethod
    def of(
        model: str, gpu: str, shape: Shape, tensor_parallel: int = 1, scale: float = 1.0, context_parallel: int = 1
    ) -> "SimulatedJob":
        if not 1e-6 <= scale <= 1e6:
            raise UserError(f"the scale is {scale!r}, but it must lie between 0.000001 and 1000000")
        job = SimulatedJob(parse_model(model), parse_gpu(gpu), shape, tensor_parallel, scale, context_parallel)
        job.problem()  # refuses a model that does not fit
        return job

    @staticmethod
    def of_profile(
        profile: Profile, shape: Shape, memory_bytes: int, microbatch: int | None = None, sequence: int = 0
    ) -> "SimulatedJob":
        """The job of a measured profile on devices of so much memory; `sequence` is the tokens of a sample, if known.

        A micro-batch has as many samples as it was measured with, unless `microbatch` says it.
        """
        job = SimulatedJob(*measured(profile, memory_bytes, microbatch, sequence), shape)
        job.problem()  # refuses a model that does not fit
        return job

    def profile(self, num_stages: int | None = None) -> Profile:
        """The cost of each op if the model is cut into `num_stages` stages (default: those of the shape)."""
        num_stages = num_stages or self.shape.num_stages
        if isinstance(self.model, MeasuredModel):
            return self.model.profile_with(num_stages)
        return _profile(self.model, self.gpu, num_stages, **self._degrees)

    def profile_of(self, layers: tuple[int, ...]) -> Profile:
        """The cost of each op if the stages have so many transformer layers."""
        if isinstance(self.model, MeasuredModel):
            return self.model.profile_of(layers)
        return _profile(self.model, self.gpu, len(layers), layers=layers, **self._degrees)

    @property
    def _degrees(self) -> dict[str, int]:
        return {"tensor_parallel": self.tensor_parallel, "context_parallel": self.context_parallel}

    @property
    def base_layers(self) -> tuple[int, ...]:
        """The number of transformer layers of each stage."""
        return tuple(map(len, self.profile().layers))

    @property
    def layer_state_bytes(self) -> int:
        """Parameters and optimizer state of one transformer layer on one GPU: what a copy of the layer sends."""
        return round(self.layers[1].num_parameters * COPIED_BYTES_PER_PARAMETER)

    def problem(self, techniques: Techniques | None = None, shared_layers: int = 0) -> Problem:
        """The planning problem of the whole cluster, limited by the memory of its GPUs.

        With shared layers, the boundaries of the stages lie where the work is divided most evenly, or where they were measured.
        """
        if not shared_layers:
            return self.problem_of(self.profile(), techniques)
        if isinstance(self.model, MeasuredModel):
            return self.problem_of(self.profile(), techniques, shared_layers)
        assert isinstance(self.gpu, GpuSpec)
        layers = spread_layers(self.model, self.gpu, self.shape.num_stages, self.tensor_parallel, self.context_parallel)
        return self.problem_of(self.profile_of(layers), techniques, shared_layers)

    def problem_of(self, profile: Profile, techniques: Techniques | None = None, shared_layers: int = 0) -> Problem:
        """The same with another profile of the model."""
        memory = Memory.bytes([self.gpu.memory_bytes] * self.shape.num_stages)
        try:
            return Problem(Cluster(self.shape), profile, memory, techniques or Techniques(), shared_layers=shared_layers)
        except MemoryTooSmall as problem:
            raise UserError(f"{self.model.name} does not fit on {self.gpu.name}: {problem}; take more stages or GPUs") from None

    @property
    def layers(self) -> tuple[LayerCost, ...]:
        """The embedding, the transformer layers and the head."""
        if isinstance(self.model, MeasuredModel):
            return self.model.layer_costs()
        return _layers(self.model, self.gpu, self.tensor_parallel, self.context_parallel)

    @property
    def num_nodes(self) -> int:
        return self.shape.num_workers

    @property
    def gpus_per_worker(self) -> int:
        return self.tensor_parallel * self.context_parallel

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of all pipelines in one step: the global batch, which only replica drop changes."""
        return self.shape.num_chains

    @property
    def samples_per_step(self) -> int:
        return self.num_microbatches * self.model.microbatch

    @property
    def state_bytes(self) -> int:
        """Parameters and optimizer state of the whole model."""
        return round(sum(layer.num_parameters for layer in self.layers) * self.tensor_parallel * BYTES_PER_PARAMETER)

    def scaled_us(self, time_us: float) -> int:
        return max(1, round(time_us * self.scale))


def simulated_job(
    model: str,
    gpu: str,
    pipelines: int,
    stages: int,
    microbatches: int,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
) -> SimulatedJob:
    """Describe a training job for `simulate`.

    Args:
        model: A model by name (`gpt3-6.7b`, `llama-3-8b`) or by its numbers (`layers=4,hidden=512,heads=8,sequence=512`).
        gpu: A GPU by name (`a100-80`), with changes if wanted (`a100-80,memory=2GB`).
        pipelines: Number of data-parallel pipelines.
        stages: Number of stages of each pipeline.
        microbatches: Number of micro-batches of each pipeline in a step.
        tensor_parallel: GPUs of a worker that share every layer. All GPUs of a worker fail together.
        context_parallel: Groups of such GPUs in a worker that divide every sequence.

    Returns:
        The job, with its estimated profile.

    Raises:
        UserError: The model or the GPU is unknown, or a stage does not fit in the memory of the GPU.

    Example:
        >>> import recycle
        >>> recycle.simulated_job("gpt3-6.7b", "a100-80", pipelines=4, stages=8, microbatches=32).samples_per_step
        128
    """
    shape = Shape(pipelines, stages, microbatches)
    return SimulatedJob.of(model, gpu, shape, tensor_parallel, context_parallel=context_parallel)


# An advice asks for every depth with every tensor-parallel degree.
_profile = lru_cache(maxsize=2048)(estimate)
_layers = lru_cache(maxsize=64)(layer_costs)
