"""Transfer of a stage's state, or of some layers: parameters, buffers and optimizer, as bytes with digests that are checked.

Three parts are sent: the length of the header and its SHA-256; the header, JSON with name, dtype and shape of every tensor, the
rest of the optimizer's state and the SHA-256 of the tensors; the tensors, one after the other.
"""

import hashlib
import json

import torch
from torch import nn
from torch.optim import Optimizer

from recycle.core.cluster import Worker
from recycle.runtime.checkpoint.state import Snapshot, put_back, take_snapshot
from recycle.runtime.compute.state_digests import tensor_bytes
from recycle.runtime.transport.gloo_groups import GlooGroups
from recycle.runtime.transport.specs import TransportBroken

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_HEADER_TAG, _BODY_TAG = 0, 1
_LENGTH_BYTES, _DIGEST_BYTES = 8, 32


def send_state(groups: GlooGroups, receiver: Worker, module: nn.Module, optimizer: Optimizer) -> int:
    """Send the whole state of the stage; return the number of bytes of its tensors."""
    return send_snapshot(groups, receiver, take_snapshot(module, optimizer))


def send_snapshot(groups: GlooGroups, receiver: Worker, snapshot: Snapshot) -> int:
    """Send a snapshot; return the number of bytes of its tensors."""
    tensors = [(name, value.contiguous()) for name, value in snapshot.tensors.items()]
    digest = hashlib.sha256()
    for _, value in tensors:
        digest.update(tensor_bytes(value))
    layout = [[name, str(value.dtype), list(value.shape)] for name, value in tensors]
    header = json.dumps({"tensors": layout, "optimizer": snapshot.optimizer, "sha256": digest.hexdigest()}).encode()
    for part in (len(header).to_bytes(_LENGTH_BYTES, "little") + hashlib.sha256(header).digest(), header):
        groups.send_bytes(receiver, torch.frombuffer(bytearray(part), dtype=torch.uint8), _HEADER_TAG)
    flat = [value.reshape(-1).view(torch.uint8) for _, value in tensors]
    body = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
    if len(body):
        groups.send_bytes(receiver, body, _BODY_TAG)
    return len(body)


def receive_state(groups: GlooGroups, sender: Worker, module: nn.Module, optimizer: Optimizer) -> int:
    """Replace module and optimizer by the state that a peer sends; return the number of bytes of its tensors."""
    snapshot = receive_snapshot(groups, sender)
    put_back(snapshot, module, optimizer)
    return sum(value.nbytes for value in snapshot.tensors.values())


def receive_snapshot(groups: GlooGroups, sender: Worker) -> Snapshot:
    """Receive the snapshot that another worker sends."""
    opening = _bytes_of(groups.receive_bytes(sender, _LENGTH_BYTES + _DIGEST_BYTES, _HEADER_TAG))
    received = groups.receive_bytes(sender, int.from_bytes(opening[:_LENGTH_BYTES], "little"), _HEADER_TAG)
    _refuse_changed(sender, received, opening[_LENGTH_BYTES:])
    header = json.loads(_bytes_of(received))
    layout = [(name, _DTYPES[dtype], shape) for name, dtype, shape in header["tensors"]]
    sizes = [dtype.itemsize * torch.Size(shape).numel() for _, dtype, shape in layout]
    total = sum(sizes)
    body = groups.receive_bytes(sender, total, _BODY_TAG) if total else torch.empty(0, dtype=torch.uint8)
    _refuse_changed(sender, body, bytes.fromhex(header["sha256"]))
    # A copy of each, because a tensor must begin at a multiple of the size of its numbers.
    parts = zip(layout, torch.split(body, sizes), strict=True)
    tensors = {name: part.clone().view(dtype).view(shape) for (name, dtype, shape), part in parts}
    return Snapshot(tensors, header["optimizer"])


def _refuse_changed(sender: Worker, body: torch.Tensor, digest: bytes) -> None:
    if hashlib.sha256(tensor_bytes(body)).digest() != digest:
        raise TransportBroken(f"what came from {sender} is not what it sent: its SHA-256 differs")


def _bytes_of(body: torch.Tensor) -> bytes:
    return tensor_bytes(body).tobytes()
