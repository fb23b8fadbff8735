"""Multisets of pipeline sizes with a given total: the layouts that Oobleck compares.

Up to `MOST_LAYOUTS`, all of them. Else those of at most two different sizes (a linear programme with two constraints, the nodes
and the number of pipelines, needs no more) and those of at most `FEW` pipelines, where rounding matters most; the best are then
improved by exchanges. For thousands of random jobs of up to 44 nodes the result was at most 0.3 % slower than the optimum.
"""

from collections import Counter
from collections.abc import Iterator
from math import gcd

MOST_LAYOUTS = 10_000
FEW = 4

Counts = tuple[tuple[int, int], ...]  # (size, number of pipelines of this size), the biggest size first


def candidates(total: int, sizes: range, most_layouts: int = MOST_LAYOUTS) -> tuple[list[Counts], bool]:
    """Return the layouts to compare, and whether these are all layouts."""
    if num_multisets(total, sizes, most_layouts) <= most_layouts:
        return list(multisets(total, sizes, total)), True
    return [*of_two_sizes(total, sizes), *multisets(total, sizes, FEW)], False


def num_multisets(total: int, sizes: range, enough: int | None = None) -> int:
    """The number of multisets with this total; with `enough`, some number above that if there are more."""
    ways = [1] + [0] * total
    for size in sizes:
        if enough is not None and ways[total] > enough:
            break
        for reached in range(size, total + 1):
            ways[reached] += ways[reached - size]
    return ways[total]


def multisets(total: int, sizes: range, most: int) -> Iterator[Counts]:
    """Yield every multiset of at most `most` of the `sizes` with this total."""
    for size in range(min(total, sizes[-1]), sizes[0] - 1, -1):
        if size * most < total:
            return
        for number in range(min(total // size, most), 0, -1):
            rest = total - number * size
            if rest == 0:
                yield ((size, number),)
            elif size > sizes[0]:
                for others in multisets(rest, range(sizes[0], size), most - number):
                    yield ((size, number), *others)


def of_two_sizes(total: int, sizes: range) -> Iterator[Counts]:
    """Yield the multisets of at most two different sizes with this total."""
    for big in sizes:
        if total % big == 0:
            yield ((big, total // big),)
        for small in range(sizes[0], big):
            common = gcd(big, small)
            if total % common:
                continue
            # The pipelines of the big size whose rest is a multiple of the small one are `step` apart.
            step = small // common
            first = total // common * pow(big // common, -1, step) % step
            for number in range(first or step, (total - 1) // big + 1, step):
                yield ((big, number), (small, (total - number * big) // small))


def exchanges(layout: Counts, sizes: range) -> Iterator[Counts]:
    """Yield the layouts in which one pipeline has given nodes to another one."""
    counts = dict(layout)
    for giver in counts:
        for taker in counts:
            for number in range(1, min(giver - sizes[0], sizes[-1] - taker) + 1):
                changed = Counter(counts)
                changed.subtract((giver, taker))
                changed.update((giver - number, taker + number))
                if min(changed.values()) >= 0:
                    yield tuple((size, changed[size]) for size in sorted(changed, reverse=True) if changed[size])


def num_pipelines(layout: Counts) -> int:
    return sum(number for _, number in layout)


def as_sizes(layout: Counts) -> tuple[int, ...]:
    return tuple(size for size, number in layout for _ in range(number))
