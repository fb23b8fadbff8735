"""Constants of every system: pauses, checkpoints, limits. docs/simulator.md has the source of each."""

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from recycle.core.errors import FileProblem, UserError
from recycle.core.units import parse_duration_us

_SECOND = 1_000_000
# Pauses of the other systems in ms, from the Oobleck authors' public simulator, for GPT-3 of so many billions of parameters.
_SIZES = (0.35, 2.7, 6.7)
_RECONFIGURE_MS = (3_000, 6_000, 10_000)  # Oobleck
_REBALANCE_MS = (100_000, 230_000, 450_000)  # Bamboo
_CHECKPOINT_MS = (11_200, 50_000, 120_000)  # Varuna
_RESTART_MS = (78_700, 515_000, 701_000)  # Varuna, a checkpoint included
_NEVER_PAUSE = ("ideal", "fault-scaled")


@dataclass(frozen=True, slots=True)
class RecycleConstants:
    """Pauses of a recovery of ReCycle: assumptions that a real run can replace by measurements.

    A death is pushed, not timed out; communicators are rebuilt once; plans are looked up. Checkpoints are written in the
    background, and are loaded only when a stage has lost all its workers. After `notice_steps` a worker is known to be slow.
    """

    detect_us: int = _SECOND
    abort_us: int = _SECOND // 2
    regroup_us: int = 5 * _SECOND
    plan_us: int = _SECOND // 2
    restart_us: int = 300 * _SECOND
    checkpoint_interval_us: int = 1800 * _SECOND
    notice_steps: int = 10
    moves: bool = True
    hang_us: int = 10 * _SECOND


@dataclass(frozen=True, slots=True)
class OobleckConstants:
    """The pause of a reconfiguration, and how many failures at once the templates must survive."""

    reconfigure_us: int
    faults: int = 3


@dataclass(frozen=True, slots=True)
class BambooConstants:
    """The pauses of a rebalance and of a global rendezvous after a fatal loss."""

    rebalance_us: int
    fatal_us: int = 30 * _SECOND


@dataclass(frozen=True, slots=True)
class ReplicaDropConstants:
    """The pause for a new quorum and new communicators."""

    reconfigure_us: int = 10 * _SECOND
    hang_us: int = 60 * _SECOND


@dataclass(frozen=True, slots=True)
class CheckpointConstants:
    """The time of a checkpoint, of a restart (detect, start, load), and between two checkpoints; 0 is Young's interval."""

    checkpoint_us: int = 10 * _SECOND
    restart_us: int = 300 * _SECOND
    checkpoint_interval_us: int = 0


@dataclass(frozen=True, slots=True)
class ElasWaveConstants:
    """Pauses of ElasWave, the share of a copy that training hides, and how fast a slow stage can be clocked."""

    detect_us: int = _SECOND
    regroup_us: int = _SECOND
    hidden_percent: int = 51
    clock_percent: int = 100
    hang_us: int = 10 * _SECOND


@dataclass(frozen=True, slots=True)
class OdysseyConstants:
    """Pauses of Odyssey beside its copies: assumed to be as long as those of ReCycle."""

    detect_us: int = _SECOND
    regroup_us: int = 5 * _SECOND
    plan_us: int = _SECOND // 2
    hang_us: int = 10 * _SECOND


@dataclass(frozen=True, slots=True)
class ResiHPConstants:
    """Pauses of ResiHP beside its copies, assumed as long as those of ReCycle, and how it sees slow workers.

    `threshold_percent`: a step that takes so much longer than predicted is a failure. `notice_steps`: after so many steps it is
    known. With `gpu_failures`, a node that leaves has lost one GPU only, and its worker goes on with half of its GPUs.
    """

    detect_us: int = _SECOND
    regroup_us: int = 5 * _SECOND
    plan_us: int = _SECOND // 2
    threshold_percent: int = 25
    notice_steps: int = 10
    gpu_failures: bool = False
    hang_us: int = 10 * _SECOND


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of all systems, and those that are the same for all.

    `ready_us` is the time until an added node can be used. `hang_us` is the time until a job notices that a worker hangs, for
    systems that have no such constant of their own.
    """

    oobleck: OobleckConstants
    bamboo: BambooConstants
    varuna: CheckpointConstants
    recycle: RecycleConstants = field(default_factory=RecycleConstants)
    elaswave: ElasWaveConstants = field(default_factory=ElasWaveConstants)
    odyssey: OdysseyConstants = field(default_factory=OdysseyConstants)
    resihp: ResiHPConstants = field(default_factory=ResiHPConstants)
    replica_drop: ReplicaDropConstants = field(default_factory=ReplicaDropConstants)
    checkpoint_restart: CheckpointConstants = field(default_factory=CheckpointConstants)
    ready_us: int = 45 * _SECOND
    hang_us: int = 600 * _SECOND

    @staticmethod
    def for_model(num_parameters: float) -> "Constants":
        reconfigure, rebalance, checkpoint, restart = (
            _by_size(num_parameters, times_ms) for times_ms in (_RECONFIGURE_MS, _REBALANCE_MS, _CHECKPOINT_MS, _RESTART_MS)
        )
        varuna = CheckpointConstants(checkpoint, restart - checkpoint)
        return Constants(OobleckConstants(reconfigure), BambooConstants(rebalance), varuna)

    def with_file(self, path: Path) -> "Constants":
        """The same, changed by the tables of a TOML file."""
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as problem:
            raise FileProblem(f"cannot read {path}: {problem.strerror or problem}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
            raise FileProblem(f"{path} is not TOML: {problem}") from None
        constants = self
        for system, table in tables.items():
            if isinstance(table, Mapping):
                for key, value in table.items():
                    constants = constants.with_value(f"{system}.{key}", value)
            else:
                constants = constants.with_value(system, table)
        return constants

    def with_values(self, pairs: Iterable[str]) -> "Constants":
        """The same, changed by texts such as `oobleck.reconfigure=57s`."""
        constants = self
        for pair in pairs:
            name, equals, value = pair.partition("=")
            if not equals:
                raise UserError(f"{pair!r} does not set a constant: write system.name=value, such as oobleck.reconfigure=57s")
            constants = constants.with_value(name.strip(), value.strip())
        return constants

    def with_value(self, name: str, value: Any) -> "Constants":
        """The same, with one constant changed; durations are texts such as `57s`."""
        system, dot, key = name.replace("-", "_").partition(".")
        if not dot and system == "ready":
            return replace(self, ready_us=_duration(name, value))
        if not dot and system == "hang":
            return replace(self, hang_us=_duration(name, value))
        known = self._tables()
        if system not in known:
            raise UserError(f"{name!r} is not a constant: it begins with ready, hang or one of {', '.join(_dashed(known))}")
        return replace(self, **{system: _with_field(name, known[system], key, value)})

    def hang_us_of(self, system: str) -> int:
        """How long the system of this name takes to notice that a worker hangs; variants have the constants of their system."""
        if system in _NEVER_PAUSE:
            return 0
        tables = self._tables()
        base = next((name for name in tables if system.replace("-", "_").startswith(name)), "")
        return int(getattr(tables.get(base), "hang_us", self.hang_us))

    def _tables(self) -> dict[str, Any]:
        """The constants of each system."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("ready_us", "hang_us")}


def young_us(checkpoint_us: int, mtbf_us: int) -> int:
    """Young's interval between two checkpoints, which loses least to first order: sqrt(2 * cost * time between failures)."""
    return round(math.sqrt(2 * checkpoint_us * mtbf_us))


def _by_size(num_parameters: float, known_ms: Sequence[int]) -> int:
    """Interpolate between the known sizes, in µs; outside their range the nearest size counts."""
    billions, value = num_parameters / 1e9, float(known_ms[0])
    for (low, high), (before, after) in zip(pairwise(_SIZES), pairwise(known_ms), strict=True):
        if billions > low:
            value = before + (after - before) * min(1.0, (billions - low) / (high - low))
    return round(value * 1000)


def _with_field(name: str, table: Any, key: str, value: Any) -> Any:
    """Set one field of a system's constants, parsed as a duration, a switch or a count like its present value."""
    names = {item.name.removesuffix("_us"): item.name for item in fields(table)}
    if key not in names:
        raise UserError(f"{name!r} is not a constant: this system has {', '.join(_dashed(names))}")
    field_name = names[key]
    is_switch = isinstance(getattr(table, field_name), bool)
    read = _duration if field_name.endswith("_us") else _switch if is_switch else _count
    return replace(table, **{field_name: read(name, value)})


def _dashed(names: Iterable[str]) -> list[str]:
    return [name.replace("_", "-") for name in names]


def _duration(name: str, value: Any) -> int:
    if not isinstance(value, str):
        raise UserError(f"{name} is {value!r}, but it is a duration: write a text such as 57s or 10m")
    return 0 if value.strip() in ("0", "0s") else parse_duration_us(value)


def _switch(name: str, value: Any) -> bool:
    words = {"true": True, "yes": True, "false": False, "no": False}
    if str(value).lower() not in words:
        raise UserError(f"{name} is {value!r}, but it is a switch: write true or false")
    return words[str(value).lower()]


def _count(name: str, value: Any) -> int:
    if not str(value).isdecimal() or not 1 <= int(str(value)) <= 10**9:
        raise UserError(f"{name} is {value!r}, but it is a whole number of at least 1")
    return int(str(value))
