"""Micro-batches by address: every sample once an epoch, in an order that is the same everywhere."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from recycle.core.cluster import Shape
from recycle.core.errors import UserError
from recycle.runtime.compute.microbatches import MicroBatches, shuffled

torch.set_num_threads(1)

SEEDS = st.integers(0, 2**63 - 1)


def numbered(num_samples):
    """A data set whose inputs say which sample they are."""
    return TensorDataset(torch.arange(num_samples), 10 * torch.arange(num_samples))


def samples_of(batches, shape, steps):
    """The samples of `steps`, by step, then pipeline, then micro-batch."""
    addresses = [(t, p, i) for t in steps for p in range(shape.num_pipelines) for i in range(shape.num_microbatches)]
    return [sample for address in addresses for sample in batches.get(*address)[0].tolist()]


@settings(deadline=None)
@given(st.integers(1, 700), SEEDS)
def test_an_order_is_a_permutation(size, seed):
    assert sorted(shuffled(position, size, seed) for position in range(size)) == list(range(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 255, 256, 257, 4096, 4097])
def test_an_order_is_a_permutation_around_powers_of_two(size):
    assert {shuffled(position, size, 1) for position in range(size)} == set(range(size))


@given(st.integers(2**40, 2**70), st.data())
def test_orders_of_any_size_are_computed_without_being_stored(size, data):
    positions = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=20))
    found = {shuffled(position, size, 3) for position in positions}
    assert len(found) == len(positions)
    assert all(0 <= number < size for number in found)


def test_an_order_is_the_same_on_every_machine():
    assert [shuffled(position, 10, 42) for position in range(10)] == [7, 3, 0, 8, 2, 9, 1, 5, 4, 6]


def test_orders_look_random():
    """Each sample stands at each position about equally often, and neighbours do not stay neighbours."""
    size, num_orders = 6, 3000
    counts = Counter((position, shuffled(position, size, seed)) for seed in range(num_orders) for position in range(size))
    # 500 are expected in each of the 36 cells, with a deviation of 20.
    assert len(counts) == 36
    assert all(400 < count < 600 for count in counts.values())
    order = [shuffled(position, 10_000, 1) for position in range(10_000)]
    assert sum(abs(one - other) == 1 for one, other in pairwise(order)) < 20
    assert sum(position == number for position, number in enumerate(order)) < 10


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 30), SEEDS)
def test_every_epoch_has_every_sample_once(num_pipelines, num_microbatches, microbatch, more, seed):
    shape = Shape(num_pipelines, 2, num_microbatches)
    per_step = num_pipelines * num_microbatches * microbatch
    size = per_step + more
    samples = samples_of(MicroBatches(numbered(size), shape, microbatch, seed), shape, range(2 * size // per_step + 2))
    epochs = [samples[start : start + size] for start in range(0, len(samples) - size + 1, size)]
    assert len(epochs) >= 2
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert all(count == 1 for count in Counter(samples[len(epochs) * size :]).values())


def test_a_micro_batch_is_a_stack_of_samples():
    dataset = TensorDataset(torch.arange(60.0).reshape(20, 3), torch.arange(20))
    inputs, targets = MicroBatches(dataset, Shape(2, 1, 2), 4, 0).get(0, 1, 1)
    assert inputs.shape == (4, 3)
    assert inputs.dtype == torch.float32
    assert torch.equal(inputs[:, 0], 3.0 * targets)


def test_the_order_does_not_depend_on_how_samples_are_shared_out():
    """The same samples make up a step, in the same order, whether two pipelines load them or three."""
    orders = []
    for shape, microbatch in ((Shape(2, 1, 3), 2), (Shape(3, 4, 2), 2), (Shape(1, 2, 1), 12), (Shape(12, 1, 1), 1)):
        orders.append(samples_of(MicroBatches(numbered(30), shape, microbatch, 7), shape, range(6)))
    assert all(order == orders[0] for order in orders)


def test_any_worker_loads_the_same_micro_batch_in_any_order():
    shape = Shape(2, 2, 3)
    one, other = MicroBatches(numbered(50), shape, 2, 7), MicroBatches(numbered(50), shape, 2, 7)
    addresses = [(step, pipeline, index) for step in range(9) for pipeline in range(2) for index in range(3)]
    forwards = {address: one.get(*address) for address in addresses}
    backwards = {address: other.get(*address) for address in reversed(addresses)}
    assert all(torch.equal(x, y) for a in addresses for x, y in zip(forwards[a], backwards[a], strict=True))


def test_epochs_and_seeds_have_orders_of_their_own():
    shape = Shape(2, 1, 5)
    runs = [samples_of(MicroBatches(numbered(100), shape, 1, seed), shape, range(20)) for seed in (1, 2)]
    orders = {tuple(run[start : start + 100]) for run in runs for start in (0, 100)}
    assert len(orders) == 4
    assert tuple(range(100)) not in orders


def test_a_dataset_smaller_than_a_step_is_refused_with_both_numbers():
    shape = Shape(2, 3, 4)
    assert len(samples_of(MicroBatches(numbered(24), shape, 3, 0), shape, [0])) == 24
    with pytest.raises(UserError, match=r"one step needs 24 samples \(2 pipelines of 4 micro-batches of 3\), .* has 23:"):
        MicroBatches(numbered(23), shape, 3, 0)


@pytest.mark.parametrize("microbatch", [0, -1, 1.5, True])
def test_micro_batches_that_are_no_count_are_refused(microbatch):
    with pytest.raises(UserError, match=f"a micro-batch has {microbatch!r} samples"):
        MicroBatches(numbered(10), Shape(1, 1, 1), microbatch, 0)


@pytest.mark.parametrize("sample", [torch.zeros(2), "ab", (torch.zeros(1),)])
def test_samples_that_are_no_pairs_of_tensors_are_refused(sample):
    with pytest.raises(UserError, match=f"is a {type(sample).__name__}, but it must be a pair \\(inputs, targets\\) of tensors"):
        MicroBatches([sample] * 4, Shape(1, 1, 1), 2, 0).get(0, 0, 0)


def test_a_dataset_that_changes_its_length_is_refused():
    data = [numbered(10)[number] for number in range(10)]
    batches = MicroBatches(data, Shape(1, 1, 1), 2, 0)
    batches.get(0, 0, 0)
    data.pop()
    with pytest.raises(UserError, match="the dataset had 10 samples when the run began, and has 9 now"):
        batches.get(1, 0, 0)


def test_nests_of_samples_are_stacked_leaf_by_leaf():
    def sample(number):
        return {"input_ids": [number, number + 1], "mask": (torch.tensor([True]), {"x": torch.ones(3)}), "labels": number}

    inputs, labels = MicroBatches([sample(number) for number in range(4)], Shape(1, 1, 1), 3, 0).get(0, 0, 0)
    assert inputs["input_ids"].tolist() == [[number, number + 1] for number in labels.tolist()]
    assert inputs["mask"][0].shape == (3, 1)
    assert inputs["mask"][1]["x"].shape == (3, 3)


@pytest.mark.parametrize("other", [{"a": torch.ones(1), "b": torch.ones(1)}, torch.ones(1), (torch.ones(1),)])
def test_samples_of_different_structures_are_refused(other):
    mixed = [({"a": torch.ones(1)}, torch.ones(1)), (other, torch.ones(1))]
    with pytest.raises(UserError, match=r"samples \d and \d of the dataset differ: one is a .*, and the other a "):
        MicroBatches(mixed, Shape(1, 1, 1), 2, 0).get(0, 0, 0)


def test_a_sample_of_texts_is_refused():
    with pytest.raises(UserError, match=r"sample \d of the dataset has a str, but it must have tensors or numbers"):
        MicroBatches([({"text": "once"}, 1)] * 4, Shape(1, 1, 1), 2, 0).get(0, 0, 0)


def test_samples_of_different_shapes_are_refused():
    ragged = [(torch.zeros(length), torch.zeros(1)) for length in (1, 2, 3)]
    with pytest.raises(UserError, match=r"samples \d and \d of the dataset have the shapes \[\d\] and \[\d\]"):
        MicroBatches(ragged, Shape(1, 1, 1), 3, 0).get(0, 0, 0)


@pytest.mark.parametrize("address", [(-1, 0, 0), (0, 2, 0), (0, 0, 3), (0, -1, 0)])
def test_addresses_beside_the_shape_are_our_mistake(address):
    with pytest.raises(AssertionError):
        MicroBatches(numbered(10), Shape(2, 1, 3), 1, 0).get(*address)


def test_a_fingerprint_distinguishes_data():
    data = TensorDataset(torch.arange(8), torch.arange(8))
    plain = repr(MicroBatches(data, Shape(1, 1, 2), 2, seed=3))
    assert plain == "micro-batches of 2 out of 8 samples, seed 3"
    data.fingerprint = "a1b2"
    assert repr(MicroBatches(data, Shape(1, 1, 2), 2, seed=3)) == "micro-batches of 2 out of 8 samples (a1b2), seed 3"
