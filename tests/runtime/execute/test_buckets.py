"""Buckets cover the gradient once, and are passed on in one order, each only when nothing more is added to it."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recycle.runtime.compute.gradients import make_sums
from recycle.runtime.compute.stage import Stage
from recycle.runtime.execute.buckets import Bucket, complete_after, make_buckets, play_last

SEED = 3


class Doubled(nn.Module):
    """A layer that is used twice, with others between, and a parameter that autograd accumulates."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x):
        return self.first(self.second(self.norm(self.first(x))).tanh())


@given(st.lists(st.integers(1, 40), max_size=8), st.integers(1, 500), st.booleans())
def test_buckets_cover_the_sums_once_from_the_end_on(sizes, bucket_bytes, is_exact):
    parameters = [torch.zeros(size, requires_grad=True) for size in sizes]
    sums = make_sums(parameters, 4, is_exact)
    buckets = make_buckets(sums, bucket_bytes)
    assert [number for bucket in reversed(buckets) for number in _numbers(bucket, sums)] == list(range(sums.flat.numel()))
    assert [id(parameter) for parameter in parameters] == [
        id(parameter) for bucket in reversed(buckets) for parameter in parameters if id(parameter) in bucket.parameters
    ]
    for bucket in buckets[:-1]:
        assert bucket.part.nbytes >= bucket_bytes
        own = [parameter for parameter in parameters if id(parameter) in bucket.parameters]
        first, _ = sums.of(own[0])
        assert bucket.part.data_ptr() == first.data_ptr()
        assert bucket.part.nbytes - first.nbytes < bucket_bytes + 256  # no smaller one would do
    for parameter in parameters:
        total, mark = sums.of(parameter)
        assert (total.data_ptr() - sums.flat.data_ptr()) % 256 == 0
        total.fill_(2)
        mark.fill_(1)
    assert sums.flat.sum() == len(parameters) + 2 * sum(sizes)


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=8), st.integers(1, 500), st.booleans())
def test_parameters_that_are_apart_are_in_no_bucket_but_all_others_and_all_marks_are(sizes, bucket_bytes, is_exact):
    parameters = [torch.zeros(size, requires_grad=True) for size, _ in sizes]
    sums = make_sums(parameters, 4, is_exact)
    apart = {id(parameter) for parameter, (_, is_apart) in zip(parameters, sizes, strict=True) if is_apart}
    buckets = make_buckets(sums, bucket_bytes, apart)
    for bucket in buckets:
        bucket.part.add_(1)
    assert bool((sums.used == 1).all())
    for parameter in parameters:
        total, _ = sums.of(parameter)
        assert bool((total == (0 if id(parameter) in apart else 1)).all())
    assert frozenset().union(*(bucket.parameters for bucket in buckets)) == {*map(id, parameters)} - apart
    assert all(bucket.parameters for bucket in buckets[:-1])


def _numbers(bucket, sums):
    """The places of a bucket in the sums."""
    begin = (bucket.part.data_ptr() - sums.flat.data_ptr()) // sums.flat.itemsize if bucket.part.numel() else 0
    return range(begin, begin + bucket.part.numel())


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 300, 10**6])
def test_nothing_is_added_to_a_bucket_after_it_was_passed_on(is_exact, is_fused, bucket_bytes):
    torch.manual_seed(SEED)
    module = Doubled()
    stage = Stage(module, make_sums(module.parameters(), 2, is_exact), 1)
    buckets, passed = make_buckets(stage.sums, bucket_bytes), []
    play = partial(play_last, buckets=buckets, on_complete=lambda part: passed.append((part, part.clone())))
    for chain in range(2):
        made = stage.forward(chain, torch.randn(3, 8), SEED)
        last = play if chain == 1 else None
        if is_fused:
            stage.backward(chain, torch.ones_like(made), last)
        else:
            stage.backward_input(chain, torch.ones_like(made))
            stage.backward_weight(chain, last)
    assert [part.data_ptr() for part, _ in passed] == [bucket.part.data_ptr() for bucket in buckets[:-1]]
    assert all(torch.equal(part, before) for part, before in passed)
    assert stage.sums.flat.count_nonzero() > 8 * 8 * 2
    means = dict(zip(module.parameters(), stage.sums.means(2), strict=True))
    assert means[module.unused.weight] is None
    assert means[module.first.weight].count_nonzero() == 64


def test_a_bucket_is_complete_after_the_last_product_that_adds_to_it():
    buckets = [Bucket(torch.zeros(1), frozenset(own)) for own in ({5}, {3, 4}, {2}, {1})]
    products = [frozenset(own) for own in ({5}, {4, 3}, {5, 1}, {3}, {1})]
    assert complete_after(buckets, products) == [3, 4, 0]
