"""OpCosts: how long each op of a plan takes, which layers it computes, and what memory it holds.

Without cuts and speeds an op costs what the profile says of its stage. With them it depends on its worker and its micro-batch as
well. Everything that asks for the cost of an op in a plan asks here.
"""

from collections.abc import Sequence

from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.core.plans.cuts import Cuts
from recycle.core.problem import Problem

Offsets = tuple[int, int]
"""The offsets of the two cuts around the part of a micro-batch that a stage computes."""
_THOUSAND = 1000
_KINDS = {kind.value: kind for kind in Kind}


def slowed_us(duration_us: int, speed: float) -> int:
    """The time of an op on a worker of this speed, rounded up."""
    return -(-duration_us * _THOUSAND // round(speed * _THOUSAND))


class OpCosts:
    """The costs of the ops of a plan, by worker, kind and chain."""

    def __init__(self, problem: Problem, cuts: Cuts = ()) -> None:
        self.problem, self.cuts = problem, cuts
        self._speeds = dict(problem.speeds)
        self._known: dict[tuple[int, str, int, int], tuple[int, int]] = {}  # duration and change of memory
        self._offsets: dict[int, list[Offsets]] = {}  # of all chains, by stage

    @property
    def is_by_stage(self) -> bool:
        """Whether an op costs the same for every worker and chain of a stage."""
        return not self.cuts and not self._speeds

    def offsets(self, stage: int, chain: int) -> Offsets:
        """The offsets of the two cuts around the part of a chain that `stage` computes."""
        if not self.cuts:
            return 0, 0
        before = self.cuts[stage - 1][chain] if stage else 0
        return before, self.cuts[stage][chain] if stage < len(self.cuts) else 0

    def offsets_of_chains(self, stage: int) -> Sequence[Offsets]:
        """The offsets of all chains at a stage, in a plan with cuts. A plan has few that differ, and millions of ops."""
        if stage not in self._offsets:
            ends = (0,) * len(self.cuts[0])
            columns = ends, *self.cuts, ends
            self._offsets[stage] = list(zip(columns[stage], columns[stage + 1], strict=True))
        return self._offsets[stage]

    def layers(self, stage: int, chain: int) -> range:
        """The layers that `stage` computes for a chain. Only for problems that know their layers."""
        return self.layers_at(stage, self.offsets(stage, chain))

    def layers_at(self, stage: int, offsets: Offsets) -> range:
        """The layers that `stage` computes between two cuts."""
        held = self.problem.held_layers
        assert held is not None, "only a problem with shared layers knows the layers of its stages"
        return range(held.sums.bounds[stage] + offsets[0], held.sums.bounds[stage + 1] + offsets[1])

    def duration_us(self, worker: Worker, kind: Kind, chain: int) -> int:
        whole = self._cost(worker.stage, kind.value, *self.offsets(worker.stage, chain))[0]
        return slowed_us(whole, self._speeds[worker]) if worker in self._speeds else whole

    def durations_us(self, worker: Worker, kinds: str, chains: Sequence[int]) -> list[int]:
        """The durations of ops on one worker, whose kinds and chains are given as columns."""
        whole = self._column(worker.stage, kinds, chains, 0)
        speed = self._speeds.get(worker)
        return whole if speed is None else [slowed_us(duration, speed) for duration in whole]

    def memory_deltas(self, worker: Worker, kinds: str, chains: Sequence[int]) -> list[int]:
        """How the ops of one worker change the memory that it holds: F when it starts, the others when they end."""
        return self._column(worker.stage, kinds, chains, 1)

    def _column(self, stage: int, kinds: str, chains: Sequence[int], which: int) -> list[int]:
        if not self.cuts:
            by_kind = {kind: self._cost(stage, kind, 0, 0)[which] for kind in set(kinds)}
            return list(map(by_kind.__getitem__, kinds))
        ops = list(zip(kinds, map(self.offsets_of_chains(stage).__getitem__, chains), strict=True))
        by_op = {(kind, offsets): self._cost(stage, kind, *offsets)[which] for kind, offsets in set(ops)}
        return list(map(by_op.__getitem__, ops))

    def _cost(self, stage: int, letter: str, before: int, after: int) -> tuple[int, int]:
        key = stage, letter, before, after
        if (known := self._known.get(key)) is not None:
            return known
        kind, problem = _KINDS[letter], self.problem
        if problem.held_layers is None or (before, after) == (0, 0):
            made = problem.duration_us(stage, kind), problem.memory_delta(stage, kind)
        else:
            layers = self.layers_at(stage, (before, after))
            made = problem.held_layers.sums.duration_us(kind, layers), self._memory_delta(kind, layers)
        self._known[key] = made
        return made

    def _memory_delta(self, kind: Kind, layers: range) -> int:
        held = self.problem.held_layers
        if held is None or self.problem.memory.unit != "bytes":
            whole = rest = len(layers)  # see `Problem.capacity`
        else:
            whole = held.sums.total("activation_bytes", layers)
            rest = min(whole, held.sums.total("weight_held_bytes", layers))
        return {Kind.F: whole, Kind.I: rest - whole, Kind.W: -rest, Kind.B: -whole}[kind]
