"""Pure functions that assign places to members, and choose the members from which others copy a stage's state.

A place is a worker's position in the plan, such as W1_2. `holders` are the places whose members hold the state of their stage.
Where whole layers move between stages, the state is copied layer by layer instead.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import cycle

from recycle.control.decide.messages import LayerTransfer
from recycle.core.cluster import Shape, Worker
from recycle.core.layers import StageLayers
from recycle.core.plans.plan_source import PlanAssignment


def first_places(rows: Collection[Worker], preferred: Sequence[Worker | None]) -> list[Worker | None]:
    """Return for each member its place in the first epoch: the preferred one, else a row that no member prefers, else None."""
    free = _in_order(set(rows) - set(preferred))
    return [place if place in rows else next(free, None) for place in preferred]


def _in_order(places: AbstractSet[Worker]) -> Iterator[Worker]:
    """Yield the places in order; they are not sorted unless somebody asks."""
    yield from sorted(places)


def free_places(shape: Shape, taken: Collection[Worker], preferred: Sequence[Worker | None]) -> list[Worker]:
    """Return a free place for each new member in turn, as long as there are any.

    A member gets its preferred place if it is free, else a place of the stage with the fewest members.
    """
    free = set(shape.workers()) - set(taken) if preferred else set()
    num_members = Counter(place.stage for place in taken)
    found: list[Worker] = []
    for wanted in preferred[: len(free)]:
        chosen = wanted if wanted is not None and wanted in free else min(free, key=lambda p: (num_members[p.stage], p))
        free.remove(chosen)
        num_members[chosen.stage] += 1
        found.append(chosen)
    return found


def keep_holders(assignment: PlanAssignment, holders: AbstractSet[Worker]) -> PlanAssignment:
    """Return the assignment with moves exchanged so that no stage loses all its holders while a member without state stays."""
    places = dict(assignment.places)
    for stage in range(assignment.plan.problem.shape.num_stages):
        new_places = [place for place, now in places.items() if now.stage == stage and now in holders]
        if not new_places or any(place.stage == stage for place in new_places):
            continue
        stateless = next((place for place, now in places.items() if place.stage == stage and now not in holders), None)
        if stateless is not None:
            moved = new_places[0]
            places[stateless], places[moved] = places[moved], places[stateless]
    return replace(assignment, places=places)


def keeps_state(assignment: PlanAssignment, holders: AbstractSet[Worker]) -> list[Worker]:
    """Return the places, in order, whose new members hold the state of the stage already."""
    return [place for place, now in sorted(assignment.places.items()) if now in holders and now.stage == place.stage]


def state_sources(
    assignment: PlanAssignment, holders: AbstractSet[Worker], transfers: Sequence[LayerTransfer] | None = None
) -> dict[str, str]:
    """Return for each place without its stage's state the place to copy from; the holders of a stage take turns.

    If layers are transferred, return for each place without any state the place that sends it the first layers.
    """
    if transfers is not None:
        stateless = {str(place) for place, now in assignment.places.items() if now not in holders}
        return {each.receiver: each.sender for each in reversed(transfers) if each.receiver in stateless}
    kept = keeps_state(assignment, holders)
    of_stage = defaultdict[int, list[Worker]](list)
    for place in kept:
        of_stage[place.stage].append(place)
    turns = {stage: cycle(places) for stage, places in of_stage.items()}
    return {str(place): str(next(turns[place.stage])) for place in sorted(assignment.places.keys() - set(kept))}


LayersAt = Mapping[Worker, AbstractSet[int]]
"""The layers whose state the member at each place holds."""


def layer_transfers(assignment: PlanAssignment, held: LayersAt, wanted: StageLayers) -> tuple[LayerTransfer, ...] | None:
    """Return the transfers after which every place of the assignment has its layers; None if nobody holds some layer.

    Members keep the layers that they hold. The holders of a layer take turns in sending it.
    """
    holders = defaultdict[int, tuple[Worker, ...]](tuple)
    for place, now in sorted(assignment.places.items()):
        for layer in held.get(now, ()):
            holders[layer] += (place,)
    turns = {each: cycle(each) for each in holders.values()}
    found: list[LayerTransfer] = []
    for place, now in sorted(assignment.places.items()):
        runs: list[tuple[tuple[Worker, ...], list[int]]] = []
        for layer in wanted.held(place.stage):
            if layer in held.get(now, ()):
                continue
            if not holders[layer]:
                return None
            if runs and runs[-1][0] == holders[layer] and runs[-1][1][-1] == layer - 1:
                runs[-1][1].append(layer)
            else:
                runs.append((holders[layer], [layer]))
        found += [LayerTransfer(str(place), str(next(turns[of])), layers[0], layers[-1] + 1) for of, layers in runs]
    held_somewhere = all(holders[layer] for layer in range(wanted.num_layers))
    return tuple(found) if held_somewhere else None


def place_refusal(shape: Shape, preferred: Worker | None, taken: Sequence[Worker | None]) -> str | None:
    """Return why a job cannot have another member that prefers a place; `taken` are places for which others have come."""
    if preferred is not None and preferred not in shape:
        return f"{preferred} is no place in this job of {shape.num_pipelines} pipelines of {shape.num_stages} stages"
    if preferred is not None and preferred in taken:
        return f"{preferred} is taken: another worker has come for it"
    return None
