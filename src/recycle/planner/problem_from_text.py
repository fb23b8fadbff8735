"""Describing a problem in the words of the command line: the same texts work in Python and in a shell."""

from collections.abc import Iterable
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
) -> Problem:
    """Return the problem that these words describe; give either `costs` (F,I,W in µs) or a `profile`.

    `memory` is a number of micro-batches in flight for all stages or one for each ("4,3,2,1"), bytes ("80GiB"), or "unlimited";
    left out, it is the profile's device memory, or unlimited.
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
    return Problem(cluster, profile, parse_memory(memory, stages, profile), chosen)


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
    """Read a memory limit; None is the device's own memory if the profile knows it."""
    if memory is None:
        return Memory.bytes([profile.device_bytes] * num_stages) if profile.device_bytes else Memory.unlimited()
    if isinstance(memory, str) and memory.strip() == "unlimited":
        return Memory.unlimited()
    if isinstance(memory, str) and is_bytes(memory):
        _refuse_bytes_without_sizes(memory, profile)
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


def _refuse_bytes_without_sizes(memory: str, profile: Profile) -> None:
    if all(stage.activation_bytes == 0 for stage in profile.stages):
        raise UserError(
            f"memory is {memory!r}, but nothing says how large an activation is: give a profile, or memory in micro-batches"
        )
