"""A stage's state from a peer: parameters, optimizer, all of it, in bytes with digests that are checked.

First comes how long the head is, with its digest; then the head, JSON with the form of every tensor, all else of the optimizer
and the digest of what follows; then the tensors, one behind the other.
"""

import hashlib
import json

import torch
from torch import nn
from torch.optim import Optimizer

from recycle.core.cluster import Worker
from recycle.runtime.checkpoint.state import Snapshot, put_back, take_snapshot
from recycle.runtime.compute.weight_digest import tensor_bytes
from recycle.runtime.transport.gloo import GlooTransport, TransportBroken

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_HEAD, _BODY = 0, 1
_LENGTH_BYTES, _DIGEST_BYTES = 8, 32


def send_state(links: GlooTransport, to: Worker, module: nn.Module, optimizer: Optimizer) -> int:
    """Send all that the stage holds; return how many bytes that was."""
    snapshot = take_snapshot(module, optimizer)
    tensors = [(name, value.contiguous()) for name, value in snapshot.tensors.items()]
    digest = hashlib.sha256()
    for _, value in tensors:
        digest.update(tensor_bytes(value))
    forms = [[name, str(value.dtype), list(value.shape)] for name, value in tensors]
    head = json.dumps({"tensors": forms, "optimizer": snapshot.optimizer, "sha256": digest.hexdigest()}).encode()
    links.send_bytes(to, _as_tensor(len(head).to_bytes(_LENGTH_BYTES, "little") + hashlib.sha256(head).digest()), _HEAD)
    links.send_bytes(to, _as_tensor(head), _HEAD)
    body = torch.cat([_flat(value) for _, value in tensors]) if tensors else torch.empty(0, dtype=torch.uint8)
    if len(body):
        links.send_bytes(to, body, _BODY)
    return len(body)


def receive_state(links: GlooTransport, source: Worker, module: nn.Module, optimizer: Optimizer) -> int:
    """Receive what a peer gives, and hold it from now on; return how many bytes that was."""
    opening = _bytes_of(links.receive_bytes(source, _LENGTH_BYTES + _DIGEST_BYTES, _HEAD))
    told = links.receive_bytes(source, int.from_bytes(opening[:_LENGTH_BYTES], "little"), _HEAD)
    _refuse_changed(source, told, opening[_LENGTH_BYTES:])
    head = json.loads(_bytes_of(told))
    forms = [(name, _DTYPES[dtype], shape) for name, dtype, shape in head["tensors"]]
    sizes = [torch.empty(0, dtype=dtype).element_size() * torch.Size(shape).numel() for _, dtype, shape in forms]
    total = sum(sizes)
    body = links.receive_bytes(source, total, _BODY) if total else torch.empty(0, dtype=torch.uint8)
    _refuse_changed(source, body, bytes.fromhex(head["sha256"]))
    # A copy of each, because a tensor of wider numbers must not begin anywhere in the bytes.
    parts = zip(forms, torch.split(body, sizes), strict=True)
    tensors = {name: part.clone().view(dtype).view(shape) for (name, dtype, shape), part in parts}
    put_back(Snapshot(tensors, head["optimizer"]), module, optimizer)
    return total


def _refuse_changed(source: Worker, body: torch.Tensor, digest: bytes) -> None:
    if hashlib.sha256(tensor_bytes(body)).digest() != digest:
        raise TransportBroken(f"what came from {source} is not what it sent: its SHA-256 differs")


def _as_tensor(body: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.uint8)


def _bytes_of(body: torch.Tensor) -> bytes:
    return tensor_bytes(body).tobytes()


def _flat(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1).view(torch.uint8) if value.dim() else value.reshape(1).view(torch.uint8)
