"""problem(): make a Problem from the texts of the command line, such as costs "10,13,9" and memory "80GiB"."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import UserError
from recycle.core.problem import Memory, Problem, Techniques
from recycle.core.profile import Profile
from recycle.core.units import is_bytes, parse_bytes

ALL = Techniques()


def problem(
    pipelines: int,
    stages: int,
    microbatches: int,
    fail: str | Iterable[str] = "",
    costs: str | tuple[int, int, int] | None = None,
    comm: int = 0,
    profile: Profile | str | Path | None = None,
    memory: str | int | Iterable[int] | None = None,
    techniques: str | Techniques = ALL,
    layers: int | None = None,
    shared_layers: int = 0,
    speeds: str | Mapping[str, float] = "",
) -> Problem:
    """Return the problem that these values describe, which are those of `recycle plan`; give either `costs` or `profile`.

    Args:
        pipelines: The number of data-parallel pipelines.
        stages: The number of stages of each pipeline.
        microbatches: The number of micro-batches of each pipeline in an iteration.
        fail: The dead workers by name, such as "W1_2,W0_0".
        costs: The time of a forward, an input gradient and a weight gradient in whole µs, such as "10,13,9".
        comm: The time between two stages in µs; only with `costs`.
        profile: A profile, or the path of a profile file.
        memory: Micro-batches in flight for all stages (6) or one number for each ("4,3,2,1"), bytes ("80GiB"), or "unlimited".
            By default it is the device memory of the profile, or unlimited.
        techniques: The techniques that a plan may use, such as "adaptive,decoupled", or "none".
        layers: The number of equal layers of the model, as many in each stage; a profile may know its layers itself.
        shared_layers: How many layers on either side of a boundary both stages hold, so that micro-batches may be cut there.
        speeds: The workers that are slower or faster than the costs say, such as "W0_3=0.6".

    Returns:
        The problem, to be given to `solve` or `build`.

    Raises:
        UserError: A value cannot be read, contradicts another one, or leaves no legal schedule.

    Example:
        >>> import recycle
        >>> example = recycle.problem(3, 4, 6, fail="W1_2", costs="1,1,1", memory=6)
        >>> [str(worker) for worker in sorted(example.cluster.failed)], str(example.techniques)
        (['W1_2'], 'adaptive,decoupled,staggered')
    """
    shape = Shape(pipelines, stages, microbatches)
    if (costs is None) == (profile is None):
        raise UserError("give the costs of the ops once: either --costs F,I,W or --profile FILE")
    if profile is None:
        assert costs is not None
        profile = Profile.uniform(stages, *parse_costs(costs), comm_us=comm)
    elif comm:
        raise UserError("a communication time goes with costs only: a profile has its own links")
    elif not isinstance(profile, Profile):
        profile = Profile.load(Path(profile))
    names = [name for name in fail.split(",") if name.strip()] if isinstance(fail, str) else list(fail)
    cluster = Cluster.of(shape, map(Worker.parse, names))
    chosen = Techniques.parse(techniques) if isinstance(techniques, str) else techniques
    if layers is not None:
        profile = _with_layers(profile, layers)
    named = parse_speeds(speeds) if isinstance(speeds, str) else [(Worker.parse(name), speed) for name, speed in speeds.items()]
    return Problem(cluster, profile, parse_memory(memory, stages, profile), chosen, tuple(named), shared_layers)


def _with_layers(profile: Profile, num_layers: int) -> Profile:
    known = sum(map(len, profile.layers))
    if profile.layers and known != num_layers:
        raise UserError(f"the profile has {known} layers, but --layers is {num_layers}: leave --layers out")
    return profile if profile.layers else profile.with_equal_layers(num_layers)


def parse_speeds(text: str) -> list[tuple[Worker, float]]:
    """Read `W0_3=0.6,W1_2=0.8`."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, sign, speed = part.partition("=")
        try:
            found.append((Worker.parse(name), float(speed)))
        except ValueError:
            sign = ""
        if not sign:
            raise UserError(f"the speed {part!r} cannot be read: write <worker>=<speed>, such as W0_3=0.6")
    return found


def unsplit_costs(costs: str | tuple[int, ...], recomputes: bool) -> tuple[int, int, int]:
    """The costs of ops where I computes all gradients, and W nothing; where it also `recomputes` activations, it runs F again."""
    forward_us, input_us, weight_us = parse_costs(costs)
    return forward_us, (forward_us if recomputes else 0) + input_us + weight_us - 1, 1


def parse_costs(costs: str | tuple[int, ...]) -> tuple[int, int, int]:
    """Read `F,I,W` in whole µs."""
    parts = costs.split(",") if isinstance(costs, str) else list(costs)
    try:
        forward, split, weight = (int(part) for part in map(str, parts))
    except ValueError:
        raise UserError(f"costs are {costs!r}, but they must be three whole numbers of µs: F,I,W, such as 10,13,9") from None
    if min(forward, split, weight) < 1:
        raise UserError(f"costs are {costs!r}, but each of F, I and W takes at least 1 µs")
    return forward, split, weight


def parse_memory(memory: str | int | Iterable[int] | None, num_stages: int, profile: Profile) -> Memory:
    """Read a memory limit; None is the device memory of the profile, if it has one."""
    if memory is None:
        return Memory.bytes([profile.device_bytes] * num_stages) if profile.device_bytes else Memory.unlimited()
    if isinstance(memory, str) and memory.strip() == "unlimited":
        return Memory.unlimited()
    if isinstance(memory, str) and is_bytes(memory):
        if all(stage.activation_bytes == 0 for stage in profile.stages):
            raise UserError(
                f"memory is {memory!r}, but nothing says how large an activation is: give a profile, or memory in micro-batches"
            )
        return Memory.bytes([parse_bytes(memory)] * num_stages)
    if isinstance(memory, str):
        try:
            limits = [int(part) for part in memory.split(",")]
        except ValueError:
            raise UserError(
                f"memory is {memory!r}, but it must be micro-batches in flight (6, or one number a stage: 4,3,2,1), "
                "bytes (80GiB), or unlimited"
            ) from None
    else:
        limits = [memory] if isinstance(memory, int) else list(memory)
    return Memory.microbatches(limits * num_stages if len(limits) == 1 else limits)
