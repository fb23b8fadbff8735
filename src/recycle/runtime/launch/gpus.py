"""The GPUs of this machine: which there are, which a user wants, and that no two agents use the same."""

import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext

import torch

from recycle.core.errors import UserError
from recycle.runtime.launch.start_process import start_process

# More than a driver takes for itself, and less than any other training.
_MOST_TAKEN = 0.5
_FIND_S = 120.0
ALL, NONE = "all", "none"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its UUID, which stays the same whatever other GPUs a process sees."""

    uuid: str
    name: str
    free_bytes: int
    total_bytes: int


def find_gpus(context: ForkServerContext) -> list[Gpu]:
    """The GPUs that this machine has, in their order. Another process looks: who has looked holds memory of each."""
    if not torch.version.cuda:
        return []
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_look, args=(sender,), daemon=True)
    start_process(process)
    sender.close()
    try:
        found: list[Gpu] | str = receiver.recv() if receiver.poll(_FIND_S) else f"nothing was found for {_FIND_S:.0f} s"
    except EOFError:
        found = "the process that looked for them ended"
    finally:
        process.kill()
        process.join()
        receiver.close()
    if isinstance(found, str):
        raise UserError(f"the GPUs of this machine cannot be used: {found}")
    return found


def _look(sender: Connection) -> None:
    try:
        numbers = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
        sender.send([_describe(number) for number in numbers])
    except Exception as problem:
        sender.send(str(problem).strip().partition("\n")[0])


def _describe(number: int) -> Gpu:
    facts = torch.cuda.get_device_properties(number)
    uuid = str(facts.uuid)
    return Gpu(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}", facts.name, *torch.cuda.mem_get_info(number))


def choose_gpus(found: Sequence[Gpu], wanted: str) -> list[Gpu]:
    """Return the GPUs that a user wants: all, none, or those with these numbers or UUIDs; raise if one is missing or taken."""
    if wanted == NONE:
        return []
    chosen = list(found)
    if wanted != ALL:
        by_name = {str(number): gpu for number, gpu in enumerate(found)} | {gpu.uuid: gpu for gpu in found}
        names = [name.strip() for name in wanted.split(",")]
        for name in names:
            if name not in by_name:
                has = ", ".join(f"{number} ({gpu.uuid})" for number, gpu in enumerate(found)) or "none"
                raise UserError(f"this machine has no GPU {name}; it has {has}")
        chosen = [by_name[name] for name in names]
        if len(set(chosen)) < len(chosen):
            raise UserError(f"a GPU is named twice in {wanted}")
    for gpu in chosen:
        if gpu.free_bytes < (1 - _MOST_TAKEN) * gpu.total_bytes:
            free, total = gpu.free_bytes / 2**30, gpu.total_bytes / 2**30
            raise UserError(
                f"{gpu.uuid} ({gpu.name}) is in use: {free:.1f} of {total:.1f} GiB are free; end what uses it, or name others"
            )
    return chosen


def hold(gpu: Gpu) -> socket.socket:
    """Keep other agents of this machine from a GPU, as long as the returned socket is open; raise if one has it.

    The name is in no file system, so that it vanishes with the process and needs no permission.
    """
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(f"\0recycle agent {gpu.uuid}")
    except OSError as problem:
        held.close()
        if problem.errno != errno.EADDRINUSE:
            raise
        raise UserError(f"{gpu.uuid} ({gpu.name}) is in use: another agent on this machine has it") from None
    return held
