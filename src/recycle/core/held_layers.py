"""HeldLayers: which layers each stage holds when neighbouring stages share some, and what holding them costs.

With k shared layers, stage s holds its own layers and the k layers on either side of them, so that a micro-batch can be cut up to
k layers before or after the boundary of two stages. A layer that several stages hold is reduced over the live workers of all of
them, and each of them steps it.
"""

from collections.abc import Sequence

from recycle.core.errors import UserError
from recycle.core.layer_sums import LayerSums
from recycle.core.layers import held_ranges
from recycle.core.profile import Profile


class HeldLayers:
    """The layers of each stage with `num_shared` layers on either side, for given numbers of live workers by stage."""

    def __init__(self, profile: Profile, num_shared: int, num_live: Sequence[int]) -> None:
        _refuse_misfit(profile, num_shared)
        self.sums = sums = LayerSums(profile)
        self.num_shared = num_shared
        inner = range(len(profile.stages))
        self.ranges = tuple(held_ranges(sums.bounds, num_shared))
        holders = [tuple(stage for stage in inner if layer in self.ranges[stage]) for layer in range(sums.num_layers)]
        self.holders = tuple(holders)
        self.shared = tuple(layer for layer, stages in enumerate(holders) if len(stages) > 1)
        self.static_bytes = tuple(sums.total("static_bytes", held) for held in self.ranges)
        self.optimizer_us = tuple(sums.total("optimizer_us", held) for held in self.ranges)
        self._profile = profile
        self._num_peers = {stages: sum(num_live[stage] for stage in stages) for stages in set(holders)}
        groups: dict[tuple[int, ...], list[int]] = {}
        for layer, stages in enumerate(holders):
            groups.setdefault(stages, []).append(layer)
        self.reduce_us = tuple(
            sum(self.sum_us(layers) for stages, layers in groups.items() if stage in stages) for stage in inner
        )
        self.finish_of_layer_us = {
            layer: self.sum_us([layer]) + sums.total("optimizer_us", range(layer, layer + 1)) for layer in self.shared
        }

    def sum_us(self, layers: Sequence[int]) -> int:
        """The time in which the holders of these layers, which are the same for all, sum their gradients in one go."""
        if not layers:
            return 0
        size_bytes = sum(self.sums.total("gradient_bytes", range(layer, layer + 1)) for layer in layers)
        return self._profile.ring_us(size_bytes, self._num_peers[self.holders[layers[0]]])


def _refuse_misfit(profile: Profile, num_shared: int) -> None:
    if not profile.layers:
        raise UserError(
            f"{num_shared} layers are to be shared, but nothing says how many layers a stage has: give --layers, or a profile "
            "with layers"
        )
    stage, least = min(enumerate(map(len, profile.layers)), key=lambda item: item[1])
    if num_shared > least:
        raise UserError(
            f"{num_shared} layers are to be shared on either side of a boundary, but stage {stage} has only {least}: "
            f"give --shared-layers {least} at most"
        )
