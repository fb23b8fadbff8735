"""`RayLauncher`: the launcher of a job on a Ray cluster. A worker is an actor, in a placement group of its own."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recycle.core.errors import UserError, WorkerFailed
from recycle.integrations.ray_agent import AgentEnd, AgentSpec, RayAgent
from recycle.runtime.launch.supervisor import EndKind, Supervisor, WorkerEnd, WorkerSlot

# How long an actor has to end by itself when the job is over, to leave when it is asked to, and to be killed.
_END_S = (10.0, 10.0, 5.0)
_THREADS = 3  # of an actor: one for each of the calls run, stop and kill


class RayPlaces:
    """The room that a job has on a cluster: a placement group for each worker, with one bundle of the resources `needs`.

    Workers do not share one group, because Ray places the lost bundles of a group all together or not at all, and has the groups
    of other jobs wait meanwhile. `reserved` is one group with room for all of them, which they replace.
    """

    def __init__(self, ray: Any, num_workers: int, needs: Mapping[str, float], reserved: Any) -> None:
        self.ray, self._needs = ray, needs
        self._groups = {number: self._make_group() for number in range(num_workers)}
        ray.util.remove_placement_group(reserved)  # now that the others are in the queue for its room

    @property
    def num(self) -> int:
        return len(self._groups)

    def make_actor(self, number: int, spec: AgentSpec, files: Any) -> Any:
        """Make the actor of a worker. Ray starts it when its group is on a machine."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._groups[number], placement_group_bundle_index=0)
        options = {"num_cpus": self._needs["CPU"], "num_gpus": self._needs.get("GPU", 0.0), "scheduling_strategy": place}
        return self.ray.remote(RayAgent).options(max_restarts=0, max_concurrency=_THREADS, **options).remote(number, spec, files)

    def renew(self, number: int) -> None:
        """Give up the room of a worker, whose machine may be gone, and ask for room anywhere."""
        self.ray.util.remove_placement_group(self._groups[number])
        self._groups[number] = self._make_group()

    def remove(self) -> None:
        for group in self._groups.values():
            self.ray.util.remove_placement_group(group)

    def _make_group(self) -> Any:
        return self.ray.util.placement_group([dict(self._needs)])


@dataclass(slots=True)
class _Actor:
    """The actor of a worker, and the results that its calls will have: `host` when it has a machine, `end` when it is over."""

    slot: WorkerSlot
    handle: Any
    host: Any
    end: Any
    machine: str = ""


class RayLauncher:
    """A `Launcher` whose workers are actors: each runs an agent with one worker. `say` gets on which machines they are.

    A worker whose actor is lost asks the cluster for room anywhere.
    """

    def __init__(self, places: RayPlaces, spec: AgentSpec, files: Mapping[str, bytes], say: Callable[[str], None]) -> None:
        self._places, self._ray, self._spec, self._say = places, places.ray, spec, say
        self._files = places.ray.put(files)
        self._actors: dict[WorkerSlot, _Actor] = {}

    def start(self, slot: WorkerSlot) -> None:
        handle = self._places.make_actor(slot.number, self._spec, self._files)
        self._actors[slot] = _Actor(slot, handle, handle.host.remote(), handle.run.remote())

    def wait(self, timeout_s: float) -> Sequence[WorkerEnd]:
        calls = [each.end for each in self._actors.values()]
        calls += [each.host for each in self._actors.values() if not each.machine]
        ready = set(self._ray.wait(calls, num_returns=1, timeout=timeout_s)[0]) if calls else set()
        if not calls:
            time.sleep(timeout_s)
        for actor in self._actors.values():
            if actor.host in ready and actor.end not in ready:
                self._placed(actor)
        return [self._collect(actor) for actor in list(self._actors.values()) if actor.end in ready]

    def end(self) -> None:
        """End every actor: by itself if it does so soon, else it is asked to leave, else it is killed."""
        for call, wait_s in zip((None, "stop", "kill"), _END_S, strict=True):
            placed = [actor for actor in self._actors.values() if self._ray.wait([actor.host], timeout=0)[0]]
            running = [actor for actor in placed if not self._ray.wait([actor.end], timeout=0)[0]]
            if not running:
                break
            if call is not None:
                self._say(f"workers {', '.join(str(actor.slot.number) for actor in running)} have not ended: {call}")
                for actor in running:
                    getattr(actor.handle, call).remote()
            self._ray.wait([actor.end for actor in running], num_returns=len(running), timeout=wait_s)
        for actor in self._actors.values():
            self._ray.kill(actor.handle)
        self._actors.clear()

    def _placed(self, actor: _Actor) -> None:
        """Note on which machine an actor is; if there is none, the end of the actor is handled by itself."""
        try:
            actor.machine = self._ray.get(actor.host)
        except self._ray.exceptions.RayError:
            return
        self._say(f"{actor.slot} is on {actor.machine}")

    def _collect(self, actor: _Actor) -> WorkerEnd:
        """Say how an actor that is over has ended. Raises UserError if Ray can set up no machine at all."""
        errors, slot = self._ray.exceptions, actor.slot
        del self._actors[slot]
        try:
            end: AgentEnd = self._ray.get(actor.end)
        except errors.RuntimeEnvSetupError as problem:
            raise UserError(f"Ray cannot set up a machine for a worker: {_last_line(problem)}") from None
        except errors.RayActorError as problem:
            self._places.renew(slot.number)
            if getattr(problem, "actor_init_failed", False):
                return WorkerEnd(slot, EndKind.FAILED, f"could not be started: {_last_line(problem)}")
            where = f" on {actor.machine}" if actor.machine else ""
            return WorkerEnd(slot, EndKind.LOST, f"is lost, with its actor{where}")
        except errors.RayError as problem:
            return WorkerEnd(slot, EndKind.FAILED, f"failed: {_last_line(problem)}")
        self._ray.kill(actor.handle)
        # An agent that ends well before the coordinator does was asked to leave on its machine.
        return WorkerEnd(slot, EndKind.FAILED, f"failed: {end}") if end.code else WorkerEnd(slot, EndKind.LEFT)


def refuse_hopeless(workers: Supervisor, num_places: int, has_begun: bool) -> None:
    """Raise WorkerFailed if the job cannot begin with the workers that are left, or if none is left."""
    if workers.num_left < (1 if has_begun else num_places):
        raise WorkerFailed(
            f"{workers.num_left} workers are left, of {num_places} that the job {'had' if has_begun else 'needs to begin'}; "
            f"{workers.last_failure}"
        )


def _last_line(problem: BaseException) -> str:
    """The line of an error of Ray that says what happened: the last one, after the traceback."""
    lines = [line.strip() for line in str(problem).strip().splitlines() if line.strip()]
    return lines[-1] if lines else type(problem).__name__
