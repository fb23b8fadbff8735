"""`ActivationMeter`: the bytes of activations that a worker holds, measured; `core/plans/memory_use.py` has them by the plan.

A plan's memory model has op boundaries only: F takes `activation_bytes`, I frees all but `weight_held_bytes`, W the rest, and B
all at once. An `ActivationMeter` measures at the same moments what a micro-batch keeps alive: every tensor that autograd saved
in its forward pass, the input and output of the stage; after I, the tensors on the tape. Temporary memory of an op is in neither.

Bytes are those of storages. A storage counts once for a worker, however many views and micro-batches share it. Parameters and
buffers do not count.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from recycle.runtime.compute.split_backward import Tape

_Saved = tuple[Tensor, int]
"""A saved tensor, and its version at that time."""


class ActivationMeter:
    """The bytes that the micro-batches of one worker hold, by chain. It keeps no activation alive, and changes no result.

    It cannot see tensors that a custom autograd function keeps as attributes of its context, and tensors without a storage, such
    as sparse ones. Under activation checkpointing, recomputed tensors are not saved, and so not counted.

    Hooks on saved tensors are torch's only public way to see them. They cost 10 µs for each saved tensor in F and 5 µs in the
    backward pass on a slow core, 1 to 9 % of a small GPT's micro-batch; so meter the first iterations only. Under hooks a custom
    function gets its saved tensors back as equal tensors, not as the same objects, and `torch.func` refuses to run.
    """

    def __init__(self, module: nn.Module) -> None:
        self._static = [*module.parameters(), *module.buffers()]
        self._static_ids = self._static_storages()
        self._held: dict[int, dict[int, int]] = {}  # the sizes of storages by their ids, by chain
        self.peak_bytes = 0

    @property
    def held_bytes(self) -> int:
        return sum({number: size_bytes for held in self._held.values() for number, size_bytes in held.items()}.values())

    @contextmanager
    def forward(self, chain: int) -> Iterator[None]:
        """Measure the forward pass of a micro-batch: from its end on, the micro-batch holds the tensors that autograd saved."""
        # A storage that only autograd refers to keeps its Python object, so that ids and weak references stay valid. The id of a
        # storage that is freed before the end of F may be reused by another, which then replaces it here.
        saved: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        static = {id(tensor) for tensor in self._static}

        def pack(tensor: Tensor) -> _Saved:
            if id(tensor) not in static and (storage := _storage(tensor)) is not None:
                saved[id(storage)] = weakref.ref(storage)
            # An output that is saved for its own gradient would form a reference cycle with its node.
            alias = tensor if tensor.is_leaf else tensor.detach()
            return alias, alias._version

        with saved_tensors_hooks(pack, _unpack):
            yield
        self._static_ids = self._static_storages()
        self._add(chain, (storage for ref in saved.values() if (storage := ref()) is not None))

    def hold(self, chain: int, *tensors: Tensor) -> None:
        """Count these tensors as held by the micro-batch, too; they must live until it releases them."""
        self._add(chain, (storage for tensor in tensors if (storage := _storage(tensor)) is not None))

    def after_input(self, chain: int, tape: Tape) -> None:
        """From now on the micro-batch holds only the tensors on its tape."""
        self.release(chain)
        self._add(chain, tape.storages())

    def release(self, chain: int) -> None:
        """From now on the micro-batch holds nothing."""
        self._held.pop(chain, None)

    def _static_storages(self) -> set[int]:
        """The ids of the storages of parameters and buffers; asked in every forward pass, because a storage may be replaced."""
        return {id(storage) for tensor in self._static if (storage := _storage(tensor)) is not None}

    def _add(self, chain: int, storages: Iterable[torch.UntypedStorage]) -> None:
        sizes = {id(storage): storage.nbytes() for storage in storages if id(storage) not in self._static_ids}
        self._held.setdefault(chain, {}).update(sizes)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except NotImplementedError:  # sparse and opaque tensors have none
        return None


def _unpack(saved: _Saved) -> Tensor:
    """Return a saved tensor; under hooks, autograd does not check itself whether it was overwritten."""
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {list(tensor.shape)} that the backward pass needs was modified in place after the forward pass "
            f"saved it: it is at version {tensor._version}, not {version}; change a copy of it instead"
        )
    return tensor
