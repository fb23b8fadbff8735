"""The lower bound of the period of every plan, proven from the problem alone.

The proof of every term, and what its letters stand for, is in docs/planner.md.
"""

from itertools import accumulate

from recycle.core.problem import Problem
from recycle.planner.model.load_bound import LoadBound


class Bounds:
    """Least times of a problem for any failures: the micro-batches of a worker are an argument of each method."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        stages, splits = problem.profile.stages, problem.techniques.decoupled
        self._forward = [stage.forward_us for stage in stages]
        # `_back`: the part of a backward pass that the stage before waits for. `_after`: the rest.
        self._back = [stage.input_us if splits else stage.fused_us for stage in stages]
        whole = [min(stage.input_us + stage.weight_us, stage.fused_us) if splits else stage.fused_us for stage in stages]
        self._after = [total - back for total, back in zip(whole, self._back, strict=True)]
        # Synchronous steps wait for the slowest.
        steps = [stage.optimizer_us for stage in stages]
        self._step = steps if problem.techniques.staggered else [max(steps)] * len(steps)
        comm = [problem.profile.comm_us(stage) for stage in range(len(stages) - 1)]
        # Times from stage 0: until an F starts at a stage, and from the end of I at a stage until its end at stage 0.
        self._down = [0, *accumulate(f + c for f, c in zip(self._forward[:-1], comm, strict=True))]
        self._up = [0, *accumulate(b + c for b, c in zip(self._back[:-1], comm, strict=True))]

    def round_trip_us(self, stage: int) -> int:
        """Least time from the start of a micro-batch's F at `stage` to the start of its I there."""
        down, up = self._down[-1] - self._down[stage], self._up[-1] - self._up[stage]
        return down + self._forward[-1] + self._back[-1] + up - self._back[stage]

    def idle_us(self, stage: int, num_microbatches: int) -> int:
        """Idle time of a worker of `stage` before its first I; negative where memory holds more F's than fit before it."""
        return self.round_trip_us(stage) - self._room(stage, num_microbatches)[0] * self._forward[stage]

    def window_us(self, stage: int, num_microbatches: int) -> tuple[int, int]:
        """Least times from the first F to the end of the last I, and to the end, of a worker with `num_microbatches`."""
        forward, back, after = self._forward[stage], self._back[stage], self._after[stage]
        at_once, pending = self._room(stage, num_microbatches)
        busy = num_microbatches * (forward + back + after) + max(0, self.idle_us(stage, num_microbatches))
        rounds, odd = divmod(num_microbatches - 1, at_once)
        round_trip = self.round_trip_us(stage)
        in_turns = rounds * (round_trip + back + self._blocks_after_us(stage)) + odd * forward + round_trip + back
        return max(busy - pending * after, in_turns), max(busy, in_turns + after)

    def _blocks_after_us(self, stage: int) -> int:
        """How long after I a micro-batch still holds the memory that another's F waits for."""
        frees_some = self._problem.held_for_weight(stage) < self._problem.held_by_forward(stage)
        return 0 if frees_some else self._after[stage]

    def _room(self, stage: int, num_microbatches: int) -> tuple[int, int]:
        """How many micro-batches fit before any I ran, and how many W's can be outstanding when an I ends."""
        problem, capacity = self._problem, self._problem.capacity(stage)
        whole, rest = problem.held_by_forward(stage), problem.held_for_weight(stage)
        if capacity is None or whole == 0:
            return num_microbatches, num_microbatches
        at_once = min(num_microbatches, capacity // whole)
        pending = num_microbatches if rest == 0 else min(num_microbatches, 1 + (capacity - whole) // rest)
        return at_once, pending

    def stage_terms(self, stage: int, num_live: int) -> tuple[int, int]:
        """Periods that `stage` enforces with `num_live` workers: by itself, and on earlier stages.

        Of an earlier stage nothing is used but its costs, so that the bound of a problem is the maximum over its stages.
        """
        to_input, to_end = self.window_us(stage, self.load(num_live))
        after_end, after_input = self.after_us(stage, num_live)
        return to_end + after_end, to_input + after_input

    def after_us(self, stage: int, num_live: int) -> tuple[int, int]:
        """What a period has besides the time from the first F to the end of a worker, and to the end of its last I.

        The latter is the way through earlier stages, and nothing if there are none.
        """
        reach = [0] * (stage + 1) if self._problem.techniques.staggered else self._down
        at_the_end = reach[stage] + self._problem.profile.reduce_us(stage, num_live) + self._step[stage]
        way = self._down[stage] + self._up[stage]
        tails = (
            reach[above] + way - self._down[above] - self._up[above] + self._after[above] + self._step[above]
            for above in range(stage)
        )
        return at_the_end, max(tails, default=0)

    def lengths_us(self, stage: int) -> tuple[int, int, int]:
        """The least lengths of F, of the part of a backward pass that the stage before waits for, and of the rest."""
        return self._forward[stage], self._back[stage], self._after[stage]

    def lost_us(self, stage: int, num_live: int) -> int:
        """The time in a period that a worker of `stage` cannot work in, by these terms, if no micro-batch is cut elsewhere."""
        busy_us = self.load(num_live) * (self._forward[stage] + self._back[stage] + self._after[stage])
        return max(0, max(self.stage_terms(stage, num_live)) - busy_us)

    def load(self, num_live: int) -> int:
        """Micro-batches that the busiest of a stage's live workers runs at least."""
        return -(-self._problem.shape.num_chains // num_live)

    def estimate_us(self, stage: int, num_live: int) -> int:
        """The period that `stage` enforces in practice, not proven: its terms plus the usual loss of found schedules.

        Gradients are delayed a little at every hop by the op that happens to run there, and while the last ones are below a
        stage, it has to run about six saved W's for every five stages below. Both numbers come from a few schedules of the
        benchmark's shapes.
        """
        alone, on_others = self.stage_terms(stage, num_live)
        hops_below = len(self._forward) - 1 - stage
        delay = (self._forward[stage] + self._after[stage]) / 20
        idle = self.idle_us(stage, self.load(num_live))
        late = max(0, idle + delay * hops_below) - max(0, idle)
        return round(max(alone + late, on_others + delay * stage + self._after[stage] * hops_below * 1.2))


def lower_bound(problem: Problem) -> int:
    """Return a lower bound of the period of every legal plan of `problem`."""
    if problem.shared_layers or problem.speeds:
        return LoadBound(problem).period_us()
    bounds, cluster = Bounds(problem), problem.cluster
    return max(max(bounds.stage_terms(stage, cluster.num_live(stage))) for stage in range(problem.shape.num_stages))
