"""Instances: the multiset of Oobleck's pipeline templates with the shortest iteration on a number of nodes.

An iteration is the 1F1B time of the slowest pipeline, then a ring all-reduce over the pipelines and the optimizer step, both of
the biggest stage of all. A pipeline runs nb micro-batches in (sum of its stages) + (nb - 1) * (its slowest stage); messages with
activations take no time. The sum is the same for every cut, so that only (nb - 1) * slowest differs between pipelines.

With a zero-bubble schedule a pipeline takes so much less as that schedule hides of the fill and the drain (`hidden_ns`), in the
memory that its stages leave for activations, with as many micro-batches as its share of the nodes. Its messages take time, unlike
those of the published schedule, which is modelled at its best; so it is no faster than a plan could be.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, islice, pairwise

import numpy as np
from numpy.typing import NDArray

from recycle.core.profile import Link
from recycle.planner.profiles.estimate import LayerCost
from recycle.sim.fault_free_schedule import FaultFreeSchedule, StageTimes, zero_bubble_idle_us
from recycle.sim.job import BYTES_PER_PARAMETER, SimulatedJob
from recycle.sim.systems.oobleck.multisets import MOST_LAYOUTS, Counts, as_sizes, candidates, exchanges, num_pipelines
from recycle.sim.systems.oobleck.templates import Template, fewest_nodes, latency_ns, template_sizes, templates, tolerated_faults

_NUM_STARTS = 16
_FIRST_TRIED = 32  # layouts whose times are computed at once, then twice as many, and so on


@dataclass(frozen=True, slots=True)
class TemplateCosts:
    """The costs of an iteration that no template has: the batch, the work of a micro-batch, the network, the optimizer."""

    num_microbatches: int
    chain_ns: int
    link: Link
    optimizer_us_per_byte: float

    @property
    def work_us(self) -> float:
        return self.num_microbatches * self.chain_ns / 1000

    def after_us(self, num_pipelines: NDArray[np.int64], gradient_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """The time of all-reduce and optimizer step for so many pipelines and gradient bytes of the biggest stage."""
        steps = 2 * (num_pipelines - 1)
        ring = steps * self.link.latency_us + steps / num_pipelines * gradient_bytes / self.link.bytes_per_us
        return ring + gradient_bytes * self.optimizer_us_per_byte


@dataclass(frozen=True, slots=True)
class _Compared:
    """Layouts with the bounds of their iteration times: a row of `matrix` has the number of pipelines of each template."""

    layouts: Sequence[Counts]
    matrix: NDArray[np.int64]
    bounds_us: NDArray[np.float64]
    after_us: NDArray[np.float64]

    @property
    def order(self) -> NDArray[np.int64]:
        return np.argsort(self.bounds_us, kind="stable")


@dataclass(frozen=True, slots=True)
class Instances:
    """The templates of a job by size, and the iteration times of their multisets. `num_wanted` pipelines tolerate the faults."""

    templates: tuple[Template, ...]
    num_wanted: int
    costs: TemplateCosts

    @property
    def sizes(self) -> range:
        return range(self.templates[0].num_nodes, self.templates[-1].num_nodes + 1) if self.templates else range(0)

    def iteration_us(self, sizes: Iterable[int]) -> float:
        matrix = self._matrix([tuple(Counter(sizes).items())])
        slowest_ns, after_us = self._slowest_ns(matrix)[0], self._after_us(matrix)[0]
        return float((self.costs.chain_ns + slowest_ns) / 1000 + after_us)

    def best(self, num_nodes: int, most_layouts: int = MOST_LAYOUTS) -> tuple[int, ...]:
        """The sizes of the pipelines with the shortest iteration on `num_nodes`, or on as many of them as templates can fill.

        There are at least `num_wanted` pipelines, or as many as the nodes suffice for. Of more than `most_layouts` layouts not
        all are compared; in our tests the result then took at most 1 % longer than the best.
        """
        usable = self.usable(num_nodes)
        if not usable:
            return ()
        layouts, are_all = candidates(usable, self.sizes, most_layouts)
        num_wanted = min(self.num_wanted, usable // self.sizes[0])
        if -(-usable // self.sizes[-1]) < num_wanted:  # else every layout has as many
            layouts = [layout for layout in layouts if num_pipelines(layout) >= num_wanted]
        compared = self._compared(layouts)
        fastest = self._fastest(compared)
        if are_all:
            return as_sizes(fastest)
        fastest = self._improved(fastest)
        found = [fastest]
        for start in islice(self._promising(compared), _NUM_STARTS):
            if self._may_beat(fastest, usable, num_pipelines(start)):
                found.append(self._improved(start))
                fastest = self._fastest(self._compared(found))
        return as_sizes(fastest)

    def _compared(self, layouts: Sequence[Counts]) -> _Compared:
        matrix = self._matrix(layouts)
        after_us = self._after_us(matrix)
        return _Compared(layouts, matrix, self._bounds_us(matrix) + after_us, after_us)

    def _may_beat(self, layout: Counts, num_nodes: int, number: int) -> bool:
        """Whether one of so many pipelines on all nodes could be faster than this layout.

        In the time of the layout every template runs a known number of micro-batches. The most that `number` pipelines
        run with real numbers of each template lies on a line between two sizes, one at most and one at least the mean size.
        """
        fastest = self._matrix([layout])
        latencies = np.array([template.slowest_ns for template in self.templates])
        hidden = np.array([template.hidden_ns for template in self.templates])
        sizes, mean_size = np.array(self.sizes), num_nodes / number
        small, big = sizes <= mean_size, sizes >= mean_size
        # Some pipeline has at most the mean size, so that the biggest stage has at least the gradients of one of these.
        least_bytes = np.array([template.gradient_bytes for template in self.templates])[small].min()
        after_us = self.costs.after_us(np.array([number]), np.array([least_bytes]))[0]
        limit_ns = int(self._slowest_ns(fastest)[0] + 1000 * (self._after_us(fastest)[0] - after_us)) + 1
        runs = np.maximum(0, (limit_ns + hidden) // latencies + 1)
        gaps = np.maximum(1, sizes[big][None, :] - sizes[small][:, None])
        slopes = (runs[big][None, :] - runs[small][:, None]) / gaps
        most = runs[small] + (mean_size - sizes[small]) * slopes.max(axis=1)
        return bool(number * most.max() >= self.costs.num_microbatches)

    def usable(self, num_nodes: int) -> int:
        """The most nodes that pipelines can use: p pipelines use any number from p times the fewest to p times the most."""
        if not self.templates:
            return 0
        fewest, most = self.sizes[0], self.sizes[-1]
        return next((number for number in range(num_nodes, fewest - 1, -1) if -(-number // most) <= number // fewest), 0)

    def _promising(self, compared: _Compared) -> Iterator[Counts]:
        """Yield the layout with the least bound for each number of pipelines, in order of the bound."""
        seen = set()
        for index in compared.order:
            number = num_pipelines(compared.layouts[index])
            if number not in seen:
                seen.add(number)
                yield compared.layouts[index]

    def _improved(self, layout: Counts) -> Counts:
        """Hill climbing: one pipeline gives nodes to another, always the best exchange, until none helps."""
        while (better := self._fastest(self._compared([layout, *exchanges(layout, self.sizes)]))) != layout:
            layout = better
        return layout

    def _fastest(self, compared: _Compared) -> Counts:
        """The layout with the shortest iteration; layouts are tried in order of their bound, until no bound is shorter."""
        layouts, bounds_us, order = compared.layouts, compared.bounds_us, compared.order
        best_us, best = float("inf"), layouts[0]
        start, end = 0, _FIRST_TRIED
        while start < len(order):
            tried = order[start:end]
            tried = tried[bounds_us[tried] < best_us]
            if not len(tried):
                break
            times_us = self._slowest_ns(compared.matrix[tried]) / 1000 + compared.after_us[tried]
            fastest = int(np.argmin(times_us))
            if times_us[fastest] < best_us:
                best_us, best = float(times_us[fastest]), layouts[tried[fastest]]
            start, end = end, 3 * end
        return best

    def _matrix(self, layouts: Sequence[Counts]) -> NDArray[np.int64]:
        """A row for each layout: the number of pipelines of each template."""
        fewest = self.sizes[0]
        matrix = np.zeros((len(layouts), len(self.templates)), dtype=np.int64)
        cells = np.array([(row, size - fewest, number) for row, layout in enumerate(layouts) for size, number in layout])
        matrix[cells[:, 0], cells[:, 1]] = cells[:, 2]
        return matrix

    def _bounds_us(self, matrix: NDArray[np.int64]) -> NDArray[np.float64]:
        """Lower bounds of the slowest pipelines, without the first micro-batch; then one runs 1 / slowest of them a ns.

        A pipeline that hides h ns has a start of h ns, if it runs a micro-batch at all. Where one might not, all are taken to
        start as early as the one that hides most.
        """
        latencies = np.array([template.slowest_ns for template in self.templates])
        hidden = np.array([template.hidden_ns for template in self.templates])
        num_microbatches, num_pipelines = self.costs.num_microbatches, matrix.sum(axis=1)
        per_ns = matrix @ (1 / latencies)
        started = matrix @ (hidden / latencies)
        least_ns: NDArray[np.float64] = (num_microbatches - num_pipelines - started) / per_ns
        most_hidden = np.where(matrix > 0, hidden, 0).max(axis=1)
        least_hidden = np.where(matrix > 0, hidden, np.iinfo(np.int64).max).min(axis=1)
        earliest_ns = np.maximum(0, num_microbatches - num_pipelines) / per_ns - most_hidden
        return np.where(least_ns >= -least_hidden, least_ns, earliest_ns) / 1000

    def _after_us(self, matrix: NDArray[np.int64]) -> NDArray[np.float64]:
        gradient_bytes = np.array([template.gradient_bytes for template in self.templates])
        return self.costs.after_us(matrix.sum(axis=1), np.where(matrix > 0, gradient_bytes, 0).max(axis=1))

    def _slowest_ns(self, matrix: NDArray[np.int64]) -> NDArray[np.int64]:
        """`slowest_ns` of every row; a layout has few sizes, so that its other columns are left out."""
        most_sizes = int((matrix > 0).sum(axis=1).max())
        chosen = np.argsort(matrix == 0, axis=1, kind="stable")[:, :most_sizes]
        latencies = np.array([template.slowest_ns for template in self.templates])[chosen]
        hidden = np.array([template.hidden_ns for template in self.templates])[chosen]
        return slowest_ns(latencies, np.take_along_axis(matrix, chosen, axis=1), hidden, self.costs.num_microbatches)


def slowest_ns(
    latencies: NDArray[np.int64], numbers: NDArray[np.int64], hidden: NDArray[np.int64], num_microbatches: int
) -> NDArray[np.int64]:
    """The time of the slowest pipeline of each layout beyond one micro-batch by 1F1B, if the batch is split optimally.

    A layout is a row; its columns have the latency of the slowest stage, the number of pipelines with it (maybe 0), and the time
    that their schedule hides. In a time x such a pipeline runs (x + hidden) // latency + 1 micro-batches, but none if x + hidden
    is below 0. A split in which no pipeline takes longer than x exists if and only if these sum up to the batch, so that the
    least such x is optimal.
    """
    low: NDArray[np.int64] = -np.where(numbers > 0, hidden, 0).max(axis=1) - 1
    high: NDArray[np.int64] = (num_microbatches / (numbers / latencies).sum(axis=1)).astype(np.int64) + 1
    while (high - low > 1).any():
        middle = (low + high) // 2
        found = (numbers * np.maximum(0, (middle[:, None] + hidden) // latencies + 1)).sum(axis=1)
        enough = found >= num_microbatches
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return high


@lru_cache(maxsize=256)
def instances(job: SimulatedJob, faults: int, schedule: FaultFreeSchedule = FaultFreeSchedule.ONE_F_ONE_B) -> Instances:
    """The templates and the costs of a job that tolerates so many faults, if its pipelines run this schedule."""
    fewest = fewest_nodes(job.layers, job.gpu.memory_bytes)
    sizes = template_sizes(job.num_nodes, fewest, faults, len(job.layers))
    whole = job.profile(1).stages[0]
    chain_ns = sum(latency_ns(layer) for layer in job.layers)
    costs = TemplateCosts(job.num_microbatches, chain_ns, job.gpu.inter_node, whole.optimizer_us / max(1, whole.gradient_bytes))
    made = templates(job.layers, sizes)
    if schedule is FaultFreeSchedule.ZERO_BUBBLE:
        made = tuple(_without_bubbles(job, template, chain_ns) for template in made)
    return Instances(made, tolerated_faults(job.num_nodes, fewest, faults) + 1, costs)


def _without_bubbles(job: SimulatedJob, template: Template, chain_ns: int) -> Template:
    """The template with a zero-bubble schedule, for the micro-batches of its share of the nodes."""
    ends = list(accumulate(template.num_layers, initial=0))
    stages = [_stage_times(job, job.layers[start:end]) for start, end in pairwise(ends)]
    num_microbatches = max(1, job.num_microbatches * template.num_nodes // job.num_nodes)
    boundary_bytes = job.profile(1).stages[0].output_bytes  # the same behind every layer
    message_us = job.gpu.inter_node.time_us(boundary_bytes)
    idle_ns = round(1000 * zero_bubble_idle_us(stages, num_microbatches, message_us))
    return replace(template, hidden_ns=max(0, chain_ns - template.slowest_ns - idle_ns))


def _stage_times(job: SimulatedJob, layers: Sequence[LayerCost]) -> StageTimes:
    """The times of a stage; of its backward pass I and W have the shares that they have in the whole model."""
    whole = job.profile(1).stages[0]
    backward_us = sum(layer.backward_us for layer in layers)
    weight_us = backward_us * whole.weight_us / (whole.input_us + whole.weight_us)
    state_bytes = BYTES_PER_PARAMETER * sum(layer.num_parameters for layer in layers)
    activation_bytes = max(1.0, sum(layer.activation_bytes for layer in layers))
    most_inflight = max(0, int((job.gpu.memory_bytes - state_bytes) / activation_bytes))
    return StageTimes(sum(layer.forward_us for layer in layers), backward_us - weight_us, weight_us, most_inflight)


@lru_cache(maxsize=16384)
def best_sizes(
    job: SimulatedJob, faults: int, num_nodes: int, schedule: FaultFreeSchedule = FaultFreeSchedule.ONE_F_ONE_B
) -> tuple[int, ...]:
    return instances(job, faults, schedule).best(num_nodes)


@lru_cache(maxsize=16384)
def layout_iteration_us(
    job: SimulatedJob, faults: int, sizes: tuple[int, ...], schedule: FaultFreeSchedule = FaultFreeSchedule.ONE_F_ONE_B
) -> float:
    return instances(job, faults, schedule).iteration_us(sizes)
