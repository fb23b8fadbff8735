"""How many bytes of activations a worker holds: as an `ActivationMeter` measures them, and as its plan counts them.

The meter measures at op boundaries, which are all that a plan's memory model knows: every tensor that autograd saved in a forward
pass, the input and the output of the stage; after I, what the tape holds for W. Each storage counts once for a worker, however
many views and micro-batches share it. Parameters and buffers do not count: they are there anyway.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from recycle.core.cluster import Cluster, Shape
from recycle.core.op import Kind
from recycle.core.plans.plan import Row
from recycle.core.problem import Memory, Problem
from recycle.core.profile import Profile, StageProfile
from recycle.runtime.compute.split_backward import Tape

_PLENTY_BYTES = 10**15

_Saved = tuple[Tensor, int]
"""A saved tensor, and the version that it had then."""


class ActivationMeter:
    """What the micro-batches of one worker hold, by chain. It keeps no activation alive, and changes no result.

    What it cannot see is a tensor that a custom autograd function keeps as an attribute of its context instead of saving it, and
    one without a storage, such as a sparse one. Under checkpointing, what is computed again is not saved, and so not counted.

    Hooks on saved tensors are torch's only public way to see them, and have a price: on a slow core 10 µs for each saved tensor
    in F and 5 µs in the backward pass, whatever their sizes. Four GPT layers save 96. That is 9 % of the time of a micro-batch of
    64 tokens 64 wide, and 1 % of one of 256 tokens 256 wide; so meter the first iterations, which hold what all others do. And a
    custom function gets its saved tensors back as equal ones, not as the same objects; `torch.func` refuses to run under hooks.
    """

    def __init__(self, module: nn.Module) -> None:
        self._static = [*module.parameters(), *module.buffers()]
        self._static_numbers = self._numbers_of_static()
        self._held: dict[int, dict[int, int]] = {}
        self._num_holders: dict[int, int] = {}
        self.held_bytes = 0
        self.peak_bytes = 0

    @contextmanager
    def forward(self, chain: int) -> Iterator[None]:
        """Around the forward pass of a micro-batch: from its end on, the micro-batch holds what autograd saved in it."""
        # A storage of which only autograd knows keeps its Python object, so that identity and weak references hold. One that
        # dies before the end of F leaves its number to another, which takes its place here.
        saved: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        static = {id(tensor) for tensor in self._static}

        def pack(tensor: Tensor) -> _Saved:
            if id(tensor) not in static and (storage := _storage(tensor)) is not None:
                saved[id(storage)] = weakref.ref(storage)
            # An output that is saved for its own gradient, kept as it is, would own its node, which owns it, for ever.
            alias = tensor if tensor.is_leaf else tensor.detach()
            return alias, alias._version

        with saved_tensors_hooks(pack, _unpack):
            yield
        self._static_numbers = self._numbers_of_static()
        self._add(chain, (storage for ref in saved.values() if (storage := ref()) is not None))

    def hold(self, chain: int, *tensors: Tensor) -> None:
        """Count these tensors as held by the micro-batch, too: they must stay for as long as it counts them."""
        self._add(chain, (storage for tensor in tensors if (storage := _storage(tensor)) is not None))

    def after_input(self, chain: int, tape: Tape) -> None:
        """From now on the micro-batch holds what its tape holds, and nothing else."""
        self.release(chain)
        self._add(chain, tape.storages())

    def release(self, chain: int) -> None:
        """From now on the micro-batch holds nothing."""
        for number, size_bytes in self._held.pop(chain, {}).items():
            self._num_holders[number] -= 1
            if self._num_holders[number] == 0:
                del self._num_holders[number]
                self.held_bytes -= size_bytes

    def _numbers_of_static(self) -> set[int]:
        """Asked for every forward pass, because a parameter may have got another storage."""
        return {id(storage) for tensor in self._static if (storage := _storage(tensor)) is not None}

    def _add(self, chain: int, storages: Iterable[torch.UntypedStorage]) -> None:
        held, num_holders = self._held.setdefault(chain, {}), self._num_holders
        for storage in storages:
            number = id(storage)
            if number in held or number in self._static_numbers:
                continue
            held[number] = size_bytes = storage.nbytes()
            num_holders[number] = num_holders.get(number, 0) + 1
            if num_holders[number] == 1:
                self.held_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


def planned_peak_bytes(row: Row, profile: StageProfile) -> int:
    """The most bytes of activations that a worker holds if it plays `row`, by the plan's memory model."""
    # The model is asked where it is stated: of a problem with this stage alone, whose memory is counted in bytes.
    alone = Problem(Cluster.of(Shape(1, 1, 1), ()), Profile((profile,)), Memory.bytes((_PLENTY_BYTES,)))
    delta = {kind.value: alone.memory_delta(0, kind) for kind in Kind}
    return max(accumulate(map(delta.__getitem__, row.kinds)), default=0)


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except NotImplementedError:  # sparse and opaque tensors have none
        return None


def _unpack(saved: _Saved) -> Tensor:
    """Give a saved tensor back; under hooks, autograd leaves it to them to notice that it was overwritten."""
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {list(tensor.shape)} that the backward pass needs was modified in place after the forward pass "
            f"saved it: it is at version {tensor._version}, not {version}; change a copy of it instead"
        )
    return tensor
