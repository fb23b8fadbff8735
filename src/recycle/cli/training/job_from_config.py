"""`TrainingJobFactory`: the job of `recycle train` and `recycle coordinator`, from a job file or of the built-in GPT.

Both give a `Job` with the shape of its cluster. The factory adds what belongs to one run of it: plan, folder and failures.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recycle.cli.training import built_in_job
from recycle.cli.training.job_file import LoadedJob, load_job_file
from recycle.cli.training.train_config import TrainConfig
from recycle.core.cluster import Shape
from recycle.core.errors import UserError
from recycle.core.events.failure_script import NOTHING, Script
from recycle.core.events.record_file import CONFIG
from recycle.core.events.trace import Trace
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import PlanSource
from recycle.core.units import parse_duration_us

if TYPE_CHECKING:
    from recycle.core.profile import Profile
    from recycle.runtime.job import Job

_OF_LOOP = ("training.evaluate_every", "training.patience", "training.time_limit", "data.evaluation_text")
# Keys that a resumed run may change: where and for how long it computes, but not what. Its checkpoint says whether another shape
# computes the same.
_FREE = ("job.", "cluster.", "checkpoint.", "log.", "training.steps", "training.device", "data.loader_processes", *_OF_LOOP)
SHAPE_KEYS = ("cluster.pipelines", "cluster.stages", "cluster.microbatches")
# Keys of the built-in GPT alone: a job file says itself what is trained.
_OF_TRAINING = ("optimizer", "rate", "weight_decay", "momentum", "schedule", "warmup")
_BUILT_IN = ("model.", "data.text", "data.evaluation_text", *(f"training.{key}" for key in _OF_TRAINING))
# Keys by which a plan is made: with any of them, a plan in the job file does not count.
_PLANNING = (
    *SHAPE_KEYS,
    *(
        f"cluster.{key}"
        for key in ("dead", "speed", "techniques", "costs", "memory", "shared_layers", "plan", "library", "profile", "measure")
    ),
)


def is_free(name: str) -> bool:
    """Whether a resumed run may change this key of the configuration."""
    return name.startswith(_FREE)


class TrainingJobFactory:
    """Makes the job that a configuration describes. torch is imported here, because planning and simulating work without it.

    `config` has the values of the job file where it was given no others. `plan` is the job file's own, if it counts. `code` are
    the digests of the job file and of the modules beside it.
    """

    def __init__(self, config: TrainConfig) -> None:
        try:
            import torch  # noqa: F401
        except ImportError as problem:
            raise UserError(
                f"training needs torch ({problem}): install it with pip install -e '.[train]' in a clone of ReCycle"
            ) from None
        loaded = _load(config) if config.job.file else LoadedJob(built_in_job.job(config), {})
        self._base, self.code = loaded.job, loaded.code
        self.config = _with_values_of(self._base, config) if config.job.file else config
        own = self._base.plan
        self.plan = own if isinstance(own, Plan) and config.given.isdisjoint(_PLANNING) else None

    @property
    def plan_source(self) -> PlanSource | None:
        """The plan source of the job file, if it names one."""
        return self._base.options.failures.plan_source

    @property
    def out(self) -> Path | None:
        """The run folder of the job file, if it names one."""
        return self._base.run_folder

    def settle_shared_layers(self, num: int) -> None:
        """Replace `auto` by the number that was chosen: the run folder and other machines must have the same."""
        cluster = replace(self.config.cluster, shared_layers=num)
        self.config = replace(self.config, cluster=cluster)

    def num_layers(self) -> list[int]:
        """The number of layers of each stage. Raises if a stage does not say what its layers are."""
        from recycle.runtime.compute.elastic_stage import layers_of

        return [len(layers_of(stage)) for stage in self._base.stages]

    def worker_memory_bytes(self) -> int:
        """The memory of a worker if all of them run on this machine."""
        from recycle.profiling.machine import worker_memory_bytes

        return worker_memory_bytes(self.config.training.device, self.config.cluster.shape.num_workers)

    def measure_profile(self) -> "Profile":
        """Measure a profile of the stages on this machine, in this process."""
        from recycle.profiling.machine import one_thread
        from recycle.profiling.rehearsal import rehearsal_plan
        from recycle.profiling.stage_times import measure_stages

        with one_thread():
            return measure_stages(self.job(rehearsal_plan(self.config.cluster.shape, is_split=True)))

    def job(
        self,
        plan: Plan,
        out: Path | None = None,
        resume: bool = False,
        plan_source: PlanSource | None = None,
        script: Script = NOTHING,
        trace: Trace | None = None,
    ) -> "Job":
        """The job by this plan, with the run folder and the failures of one run."""
        options, config = self._base.options, self.config
        about = {} if config.job.file else {name: value for name, value in config.values().items() if not is_free(name)}
        failures = replace(options.failures, plan_source=plan_source)
        if script != NOTHING or trace is not None:
            failures = replace(failures, script=script, trace=trace)
        checkpoint = replace(options.checkpoint, resume=resume, about={**options.checkpoint.about, **about})
        name = options.run_folder.name or Path(config.job.file).stem
        run_folder = replace(options.run_folder, name=name, files={**options.run_folder.files, CONFIG: config.to_toml()})
        options = replace(options, checkpoint=checkpoint, run_folder=run_folder, failures=failures)
        return replace(self._base, plan=plan, out=out, options=options)


_FAILURES = "compare_every", "restarts", "follow_speeds"


def _load(config: TrainConfig) -> LoadedJob:
    """The job of a job file, with the changes of the keys that were given."""
    path = Path(config.job.file)
    if of_gpt := sorted(name for name in config.given if name.startswith(_BUILT_IN)):
        raise UserError(f"{of_gpt[0]} is a key of the built-in GPT, but {path} says itself what is trained: leave it out")
    loaded = load_job_file(path)
    job, given = loaded.job, {name: value for name, value in config.values().items() if name in config.given}
    checkpoint = {name: given[f"checkpoint.{name}"] for name in ("every", "keep") if f"checkpoint.{name}" in given}
    options = replace(
        job.options,
        **_options_of(given),
        checkpoint=replace(job.options.checkpoint, **checkpoint),
        data=replace(job.options.data, **_renamed(given, "data", loader_processes="")),
        evaluation=replace(job.options.evaluation, **_renamed(given, "training", evaluate_every="every", patience="")),
        failures=replace(job.options.failures, **_renamed(given, "cluster", lease="lease_s", **dict.fromkeys(_FAILURES, ""))),
    )
    changes = _renamed(given, "training", steps="") | _renamed(given, "data", samples="")
    shape = job.shape if given.keys().isdisjoint(SHAPE_KEYS) else _with_values_of(job, config).cluster.shape
    if shape.num_stages != job.shape.num_stages:
        from recycle.runtime.cutting.cut import recut

        changes["stages"] = recut(job.stages, shape.num_stages)
    return replace(loaded, job=replace(job, plan=shape if shape != job.shape else job.plan, options=options, **changes))


def _options_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a job that the keys change which were given."""
    found = _renamed(
        given, "training", seed="", exact="is_exact", device="", activation_checkpointing="", compile="compile_backend"
    )
    found |= _renamed(given, "cluster", port="", transport="")
    if isinstance(shared := given.get("cluster.shared_layers"), int):  # else the plan will say it
        found["shared_layers"] = shared
    if "training.max_norm" in given:
        found["max_norm"] = given["training.max_norm"] or None
    if "training.time_limit" in given:
        found["time_limit_s"] = parse_duration_us(given["training.time_limit"]) / 1e6 if given["training.time_limit"] else None
    if "training.precision" in given:
        found["autocast"] = built_in_job.autocast_dtype(given["training.precision"])
    if "training.lean_steps" in given:
        found["lean_steps"] = built_in_job.LEAN_STEPS[given["training.lean_steps"]]
    if "training.sums" in given:
        found["sum_dtype"] = built_in_job.sum_dtype(given["training.sums"])
    return found


def _renamed(given: Mapping[str, Any], section: str, **names: str) -> dict[str, Any]:
    """The values of a section's keys that were given, by the names of their options; an empty name is the key's own."""
    return {option or key: given[f"{section}.{key}"] for key, option in names.items() if f"{section}.{key}" in given}


def _with_values_of(job: "Job", config: TrainConfig) -> TrainConfig:
    """The configuration with the shape, steps, samples and device of the job where it was given no others."""

    def keep(section: Any, name: str, values: Mapping[str, Any]) -> Any:
        return replace(section, **{key: value for key, value in values.items() if f"{name}.{key}" not in config.given})

    shape: Shape = job.shape
    sizes = {"pipelines": shape.num_pipelines, "stages": shape.num_stages, "microbatches": shape.num_microbatches}
    return replace(
        config,
        cluster=keep(config.cluster, "cluster", {**sizes, "shared_layers": job.shared_layers}),
        training=keep(config.training, "training", {"steps": job.steps, "device": job.options.device}),
        data=keep(config.data, "data", {"samples": job.samples}),
    )
