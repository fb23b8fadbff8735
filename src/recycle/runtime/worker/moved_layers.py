"""The job as a worker sees it when whole layers have moved to other stages, and the layers that it keeps while they move.

Every worker can make the whole model. So it can make the modules of any stage, whatever layers are that stage's own; their state
comes from the workers that hold it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

from torch import nn

from recycle.control.decide.messages import LayerTransfer, ProgressReport
from recycle.core.cluster import Worker
from recycle.runtime.checkpoint.layer_state import only_layers, snapshot_by_layer, snapshot_of_stage, with_layers
from recycle.runtime.checkpoint.state import Snapshot, put_back, take_snapshot
from recycle.runtime.compute.elastic_stage import elastic_stages, layers_of
from recycle.runtime.compute.tied_parameters import find_ties
from recycle.runtime.execute.stage_state import StageState
from recycle.runtime.transport.gloo_groups import GlooGroups
from recycle.runtime.transport.state_transfer import receive_snapshot, send_snapshot
from recycle.runtime.worker.worker_spec import MakeModel, WorkerSpec, copied_stage


def own_layer_counts(spec: WorkerSpec) -> tuple[int, ...]:
    """How many layers the job's own stages have; empty if they do not say it."""
    return tuple(map(len, spec.layers.stages)) if spec.layers is not None else ()


def spec_with_layers(spec: WorkerSpec, counts: tuple[int, ...]) -> WorkerSpec:
    """The spec of the same job with so many layers in each stage; `spec` is that of the job's own stages."""
    if counts == own_layer_counts(spec):
        return spec
    assert spec.make_model is not None, "the layers of this job cannot move"
    assert spec.layers is not None
    ends = list(accumulate(counts))[:-1]
    return replace(
        spec,
        make_stage=partial(make_moved_stage, spec.make_model, counts, spec.shared_layers),
        boundaries={stage: spec.layer_specs[end - 1] for stage, end in enumerate(ends)},
        ties=find_ties(moved_stages(spec.make_model(), counts, spec.shared_layers)),
        layers=spec.layers.with_counts(counts),
    )


def make_moved_stage(make_model: MakeModel, counts: Sequence[int], num_shared: int, stage: int) -> nn.Module:
    """A new copy of a stage that has other layers than the job's own stages."""
    return copied_stage(moved_stages(make_model(), counts, num_shared), stage)


def moved_stages(model: Sequence[nn.Module], counts: Sequence[int], num_shared: int) -> Sequence[nn.Module]:
    """The stages of a model with so many of its layers each, and with their guests; tensors are named by layer."""
    layers = [(str(number), layer) for number, layer in enumerate(layer for stage in model for layer in layers_of(stage))]
    bounds = (0, *accumulate(counts))
    stages = [nn.Sequential(OrderedDict(layers[start:stop])) for start, stop in pairwise(bounds)]
    return elastic_stages(stages, num_shared) if num_shared else stages


@dataclass(frozen=True, slots=True)
class KeptLayers:
    """The state of layers that a worker keeps in the host's memory until all workers have theirs, and its progress then.

    A transfer that is broken off has changed nothing for those who keep this.
    """

    layers: frozenset[int]
    snapshot: Snapshot
    progress: ProgressReport

    @staticmethod
    def of(state: StageState, held: range, own_layers: range, also: "KeptLayers | None" = None) -> "KeptLayers":
        """Keep the layers `held` of a state that has resumed; and those that were kept before, if there are any."""
        stage, progress = state.stage, state.progress()
        snapshot = snapshot_by_layer(take_snapshot(stage.module, state.stepper.optimizer), stage.module, own_layers)
        if also is None:
            return KeptLayers(frozenset(held), snapshot, progress)
        new = frozenset(held) - also.layers
        joined = with_layers(also.snapshot, only_layers(snapshot, new)) if new else also.snapshot
        return KeptLayers(also.layers | new, joined, also.progress)

    def send(self, groups: GlooGroups, transfer: LayerTransfer) -> None:
        layers = range(transfer.first, transfer.end)
        send_snapshot(groups, Worker.parse(transfer.receiver), only_layers(self.snapshot, layers))


class ReceivedLayers:
    """The layers from which a worker makes the state of its stage: those that it keeps, and those that others send."""

    def __init__(self, kept: KeptLayers | None) -> None:
        self._parts = [(kept.layers, kept.snapshot)] if kept is not None else []

    def receive(self, groups: GlooGroups, transfer: LayerTransfer) -> None:
        layers = frozenset(range(transfer.first, transfer.end))
        self._parts.append((layers, receive_snapshot(groups, Worker.parse(transfer.sender))))

    def put_into(self, state: StageState, own_layers: range) -> None:
        module, optimizer = state.stage.module, state.stepper.optimizer
        put_back(snapshot_of_stage(self._parts, module, own_layers, optimizer), module, optimizer)
