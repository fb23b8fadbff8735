"""A Ray cluster as the driver of a job sees it: connecting to it, the room that it has for workers, and reserving that room."""

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recycle.core.errors import UserError

AUTO = "auto"
_CONNECT_S, _LOOK_S, _FIRST_S, _SAY_S = 5.0, 0.5, 1.0, 10.0
_START_ONE = "start one with 'ray start --head', or name the cluster with --address HOST:PORT"


def import_ray() -> Any:
    """The module Ray; raises UserError with the command that installs it."""
    try:
        import ray
    except ImportError as problem:
        raise UserError(f"this needs Ray ({problem}): install it with pip install -e '.[ray]' in a clone of ReCycle") from None
    return ray


@contextmanager
def connected(address: str, working_dir: Path | str | None = None) -> Iterator[Any]:
    """Connect to the cluster at `address`, and yield the module Ray; a connection that exists already is used, and kept.

    Raises UserError if there is no cluster, or if it has another version of Ray or of Python.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    if address.startswith("ray://"):
        raise UserError(
            f"{address} is an address of Ray Client, but the coordinator runs on a machine of the cluster: run this there, "
            "or with 'ray job submit'"
        )
    _refuse_silent(os.environ.get("RAY_ADDRESS", "") if address == AUTO else address)
    options = {"runtime_env": {"working_dir": str(working_dir)}} if working_dir is not None else {}
    try:
        ray.init(address, logging_level="warning", **options)
    except (ConnectionError, OSError, RuntimeError, ValueError) as problem:
        if isinstance(problem, ConnectionError) and address == AUTO:
            raise UserError(f"no Ray cluster runs on this machine: {_START_ONE}") from None
        raise UserError(f"cannot use the Ray cluster at {address}: {_first_line(problem)}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _refuse_silent(address: str) -> None:
    """Raise if nothing listens at an address; Ray itself would wait for a minute, and end this process."""
    host, colon, port = address.rpartition(":")
    if not colon:
        if address and address not in (AUTO, "local"):
            raise UserError(f"{address!r} is no address of a Ray cluster: write HOST:PORT, or auto for the one on this machine")
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise UserError(f"there is no Ray cluster at {address} ({reason}): {_START_ONE}") from None


def _first_line(problem: BaseException) -> str:
    return str(problem).strip().partition("\n")[0]


def num_places(machines: Iterable[Mapping[str, float]], needs: Mapping[str, float]) -> int:
    """How many workers that need these resources each have room on machines with those."""
    return sum(min(int((machine.get(name, 0.0) + 1e-4) / amount) for name, amount in needs.items()) for machine in machines)


def format_resources(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())


def describe_room(ray: Any, num_workers: int, needs: Mapping[str, float]) -> str:
    """What the workers need, and what the cluster has."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    has, free = ray.cluster_resources(), ray.available_resources()
    total = {name: has.get(name, 0.0) for name in needs}
    unused = {name: free.get(name, 0.0) for name in needs}
    return (
        f"{num_workers} workers need {format_resources(needs)} each; the cluster of {len(machines)} machines has "
        f"{format_resources(total)}, room for {num_places(machines, needs)} of them, and {format_resources(unused)} are free"
    )


def reserve(
    ray: Any,
    num_workers: int,
    needs: Mapping[str, float],
    wait_s: float | None,
    say: Callable[[str], None],
    is_over: Callable[[], bool],
) -> Any:
    """Reserve room for all workers at once, and return its placement group when the cluster has that room.

    It says what is missing while it waits. It returns None when `is_over`, and raises UserError after `wait_s`.
    """
    group = ray.util.placement_group([dict(needs)] * num_workers, strategy="PACK")
    begin_s = time.monotonic()
    say_s, said = begin_s + _FIRST_S, ""
    try:
        while not is_over():
            if group.wait(_LOOK_S):
                group, reserved = None, group
                return reserved
            now_s = time.monotonic()
            if wait_s is not None and now_s > begin_s + wait_s:
                room = describe_room(ray, num_workers, needs)
                raise UserError(f"there was no room for {wait_s:g} s: {room}; add machines, or ask for fewer or smaller workers")
            if now_s > say_s:
                say_s, sentence = now_s + _SAY_S, describe_room(ray, num_workers, needs)
                if sentence != said:
                    say(f"waiting for room: {sentence}")
                said = sentence
        return None
    finally:
        if group is not None:
            ray.util.remove_placement_group(group)
