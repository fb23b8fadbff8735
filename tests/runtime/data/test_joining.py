"""How samples become micro-batches: padded to the longest, by a collate function, packed, in orders of a user."""

from collections import Counter
from itertools import product

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as torchdata_sampler

import recycle
from recycle import DataOptions, Padding, UserError
from recycle.core.cluster import Shape
from recycle.core.errors import DataFailed
from recycle.runtime.boundary.boundary_spec import BoundarySpec
from recycle.runtime.data.make_source import micro_batches_of
from recycle.runtime.data.torch_loaders import unwrapped

torch.set_num_threads(1)
SHAPE = Shape(1, 1, 2)


def rows(*lengths):
    """Token ids and labels of these lengths, and a number for each."""
    return [
        {"input_ids": list(range(1, length + 1)), "weight": float(number), "labels": [7] * length}
        for number, length in enumerate(lengths)
    ]


def batches(data, samples=2, shape=SHAPE, **options):
    return micro_batches_of(data, shape, samples, 3, DataOptions(order="sequential", **options))


def test_samples_are_padded_to_the_longest_of_their_micro_batch():
    source = batches(rows(3, 5, 1, 2), padding=Padding(8))
    inputs, labels = source.get(0, 0, 0)
    assert inputs["input_ids"].tolist() == [[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]]
    assert labels.tolist() == [[7, 7, 7, -100, -100], [7] * 5]
    assert inputs["weight"].tolist() == [0.0, 1.0]
    inputs, labels = source.get(0, 0, 1)
    assert inputs["input_ids"].shape == labels.shape == (2, 2)
    inputs, labels = source.largest()
    assert inputs["input_ids"].shape == labels.shape == (2, 8)


def test_what_fills_the_gap_and_which_entries_have_one_can_be_chosen():
    padding = Padding(8, {"input_ids": 9, "labels": -1}, multiple_of=4)
    inputs, labels = batches(rows(3, 1, 1, 1), padding=padding).get(0, 0, 0)
    assert inputs["input_ids"].tolist() == [[1, 2, 3, 9], [1, 9, 9, 9]]
    assert labels.tolist() == [[7, 7, 7, -1], [7, -1, -1, -1]]
    pairs = [(torch.ones(length, 2), torch.ones(3)) for length in (1, 2, 3, 4)]
    inputs, targets = batches(pairs, padding=Padding(4, names=("inputs",))).largest()
    assert inputs.shape == (2, 4, 2)
    assert targets.shape == (2, 3)


def test_a_sample_that_is_too_long_is_refused_or_cut():
    with pytest.raises(
        DataFailed, match=r"^sample 1 of the dataset: input_ids has a length of 5, more than max_length 4: cut it"
    ):
        batches(rows(3, 5, 1, 2), padding=Padding(4)).get(0, 0, 0)
    inputs, labels = batches(rows(3, 5, 1, 2), padding=Padding(4, truncates=True)).get(0, 0, 0)
    assert inputs["input_ids"].tolist() == [[1, 2, 3, 0], [1, 2, 3, 4]]
    assert labels.shape == (2, 4)


def collated(samples):
    longest = max(len(each["input_ids"]) for each in samples)
    ids = torch.tensor([each["input_ids"] + [0] * (longest - len(each["input_ids"])) for each in samples])
    return {"input_ids": ids, "labels": ids}


def test_a_collate_function_makes_micro_batches():
    source = batches(rows(3, 5, 1, 2), collate=collated, padding=Padding(8))
    inputs, labels = source.get(0, 0, 0)
    assert inputs["input_ids"].tolist() == labels.tolist() == [[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]]
    assert source.largest()[0]["input_ids"].shape == (2, 8)
    with pytest.raises(DataFailed, match="input_ids has a length of 5, more than max_length 4"):
        batches(rows(3, 5, 1, 2), collate=collated, padding=Padding(4)).get(0, 0, 0)


@pytest.mark.parametrize(
    ("collate", "sentence"),
    [
        (
            lambda samples: torch.ones(2),
            r"collate made a tensor of the samples 0, 1, but it must make a pair \(inputs, targets\)",
        ),
        (lambda samples: samples[5], "collate raised IndexError for the samples 0, 1: list index out of range"),
        (lambda samples: ("a", torch.ones(1)), "has a str, but it must have tensors or numbers"),
    ],
)
def test_a_collate_function_that_makes_something_else_is_refused(collate, sentence):
    with pytest.raises(UserError, match=sentence):
        batches(rows(3, 3, 3, 3), collate=collate).get(0, 0, 0)


def test_a_collate_function_that_gives_different_structures_is_refused():
    def moody(samples):
        x = torch.ones(2, 3)
        return ({"x": x, "more": x} if samples[0]["weight"] else {"x": x}), x

    source = batches(rows(3, 3, 3, 3), collate=moody)
    source.get(0, 0, 0)
    sentence = (
        r"^micro-batch 1 of pipeline 0 in step 1 has a dict of x, more and a tensor, but the first one has a dict of x and a "
    )
    with pytest.raises(DataFailed, match=sentence):
        source.get(0, 0, 1)


def test_a_message_of_any_length_travels_in_the_room_of_the_largest():
    spec = BoundarySpec.of(
        {"x": torch.ones(2, 8, 3, requires_grad=True), "mask": torch.ones(2, 8, dtype=torch.bool)}, varies=True
    )
    spec = BoundarySpec.parse(spec.to_json())
    for length in (0, 1, 5, 8):
        sent = [torch.rand(2, length, 3), torch.rand(2, length) > 0.5]
        body = spec.forwards.pack(sent, torch.device("cpu"))
        assert body.shape == spec.forwards.spec.shape
        assert all(torch.equal(one, other) for one, other in zip(sent, spec.forwards.unpack(body), strict=True))
    gradient = torch.rand(2, 5, 3)
    assert torch.equal(spec.backwards.unpack(spec.backwards.pack([gradient], torch.device("cpu")))[0], gradient)
    one = BoundarySpec.of(torch.ones(2, 8), varies=True)
    body = one.forwards.pack([torch.ones(2, 3)], torch.device("cpu"))
    assert one.forwards.unpack(body)[0].shape == (2, 3)
    body[8] = 9
    with pytest.raises(UserError, match=r"says that it has a tensor of shape \[2, 9\], more than \[2, 8\]"):
        one.forwards.unpack(body)


def test_a_sampler_says_the_order_of_every_pass():
    def backwards(seed, data_pass):
        assert seed == 3
        return range(7, -1, -1) if data_pass == 0 else [0, 2, 4, 6, 1, 3, 5, 7]

    data = TensorDataset(torch.arange(8), torch.arange(8))
    source = micro_batches_of(data, SHAPE, 2, 3, DataOptions(order=backwards))
    order = [number for step, index in product(range(4), range(2)) for number in source.get(step, 0, index)[0].tolist()]
    assert order == [7, 6, 5, 4, 3, 2, 1, 0, 0, 2, 4, 6, 1, 3, 5, 7]
    assert "in the order of" in repr(source)
    with pytest.raises(DataFailed, match="the sampler gives 3 samples in pass 0, but the dataset has 8"):
        micro_batches_of(data, SHAPE, 2, 3, DataOptions(order=lambda seed, data_pass: range(3))).get(0, 0, 0)


DATA = TensorDataset(torch.arange(8), torch.arange(8))


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_loader_stands_for_its_parts(kind):
    found, samples, options = unwrapped(kind(DATA, batch_size=4, num_workers=2, collate_fn=collated), 1, DataOptions())
    assert (found, samples) == (DATA, 4)
    assert options == DataOptions(2, collate=collated, order="sequential")
    _, _, options = unwrapped(kind(DATA, batch_size=4, shuffle=True), 4, DataOptions(3))
    assert options == DataOptions(3)


def passes(loader, num_passes, length, seed=3):
    """The samples of the first passes over the data of a loader, in micro-batches of two, two a step."""
    data, samples, options = unwrapped(loader, 2, DataOptions())
    source = micro_batches_of(data, SHAPE, samples, seed, options)
    numbers = [each for step in range(num_passes * length // 4) for index in (0, 1) for each in source.numbers(step, 0, index)]
    return [numbers[first : first + length] for first in range(0, len(numbers), length)]


SAMPLERS = [(DataLoader, RandomSampler), (StatefulDataLoader, torchdata_sampler.RandomSampler)]


@pytest.mark.parametrize(("kind", "sampler"), SAMPLERS)
def test_a_random_sampler_keeps_its_number_of_samples(kind, sampler):
    few = passes(kind(DATA, batch_size=2, sampler=sampler(DATA, num_samples=4)), 30, 4)
    assert all(len(set(each)) == 4 for each in few)
    assert {number for each in few for number in each} == set(range(8))
    many = passes(kind(DATA, batch_size=2, sampler=sampler(DATA, num_samples=12)), 4, 12)
    assert all(sorted(each[:8]) == list(range(8)) and len(set(each[8:])) == 4 for each in many)
    assert len(set(map(tuple, many))) == 4


@pytest.mark.parametrize(("kind", "sampler"), SAMPLERS)
def test_a_random_sampler_keeps_its_replacement(kind, sampler):
    drawn = passes(kind(DATA, batch_size=2, sampler=sampler(DATA, replacement=True)), 30, 8)
    assert any(len(set(each)) < 8 for each in drawn)
    counts = Counter(number for each in drawn for number in each)
    assert sorted(counts) == list(range(8))
    assert max(counts.values()) < 60, "30 are expected of each"


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_the_generator_of_a_loader_decides_its_order(kind):
    def shuffled_by(generator, seed=3):
        return passes(kind(DATA, batch_size=2, shuffle=True, generator=generator), 3, 8, seed)

    one, again, other = (shuffled_by(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert all(sorted(each) == list(range(8)) for each in one)
    assert shuffled_by(torch.Generator().manual_seed(1), seed=4) == one, "the seed of the job decides where there is no other"
    used = torch.Generator().manual_seed(1)
    torch.randperm(3, generator=used)
    assert shuffled_by(used) != one
    assert shuffled_by(None) == shuffled_by(None)


@pytest.mark.parametrize(("kind", "sampler"), SAMPLERS)
def test_the_generator_of_a_sampler_decides_its_order(kind, sampler):
    def sampled_by(seed):
        generator = torch.Generator().manual_seed(seed)
        return passes(kind(DATA, batch_size=2, sampler=sampler(DATA, generator=generator)), 3, 8)

    assert sampled_by(1) == sampled_by(1)
    assert sampled_by(1) != sampled_by(2)


def test_samplers_say_what_they_are_so_that_a_run_is_not_resumed_with_others():
    """A checkpoint has the text of the data, and is refused by a job with another one."""
    texts = set()
    for options in ({}, {"num_samples": 4}, {"replacement": True}, {"generator": torch.Generator().manual_seed(1)}):
        data, samples, found = unwrapped(DataLoader(DATA, 2, sampler=RandomSampler(DATA, **options)), 2, DataOptions())
        texts.add(repr(micro_batches_of(data, SHAPE, samples, 3, found)))
    assert len(texts) == 4


def test_a_sampler_that_draws_too_little_is_told():
    loader = DataLoader(DATA, batch_size=2, sampler=RandomSampler(DATA, num_samples=3))
    with pytest.raises(UserError, match=r"^one step needs 4 samples .*, but the sampler of the loader draws 3: give more data"):
        passes(loader, 1, 4)


@pytest.mark.parametrize("before_state", [False, True])
def test_a_loader_that_was_restored_to_a_position_is_refused(before_state):
    loader = StatefulDataLoader(DATA, batch_size=2, shuffle=True)
    assert unwrapped(loader, 2, DataOptions())[1] == 2
    next(iter(loader))
    assert unwrapped(loader, 2, DataOptions())[1] == 2, "another iterator begins anew"
    restored = StatefulDataLoader(DATA, batch_size=2, shuffle=True)
    restored.load_state_dict(loader.state_dict())
    if before_state:
        restored.state_dict()
    with pytest.raises(UserError, match=r"^the loader was restored to a position .*: give a new loader, and resume with Check"):
        unwrapped(restored, 2, DataOptions())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": 3}, "the job has 2 samples in a micro-batch, but its loader a batch_size of 3"),
        ({"batch_size": None}, "the loader has no batch_size"),
        ({"batch_sampler": BatchSampler(RandomSampler(range(8)), 2, False)}, "the loader has no batch_size"),
        ({"batch_size": 2, "sampler": SubsetRandomSampler(range(4))}, "has a SubsetRandomSampler, whose order another worker"),
        ({"batch_size": 2, "sampler": RandomSampler(range(4))}, "draws from 4 samples, but the dataset has 8"),
        ({"batch_size": 2, "worker_init_fn": print}, "the loader has a worker_init_fn"),
    ],
)
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_loader_with_ways_of_its_own_is_refused(kind, options, sentence):
    with pytest.raises(UserError, match=sentence):
        unwrapped(kind(DATA, **options), 2, DataOptions())


class Texts:
    """A stream of sequences of lengths 1, 2, ..., whose tokens are all different."""

    def __init__(self, num=9):
        self.num = num

    def __iter__(self):
        first = 0
        for length in range(1, self.num + 1):
            yield {"input_ids": list(range(first, first + length))}
            first += length


def test_packed_samples_have_one_length_and_lose_no_token():
    packed = list(recycle.pack(Texts(), 4))
    ids = [token for row in packed for token in row["input_ids"].tolist()]
    assert ids == list(range(44))
    positions = [each for row in packed for each in row["position_ids"].tolist()]
    assert positions == [each for length in range(1, 10) for each in range(length)][:44]
    labels = [label for row in packed for label in row["labels"].tolist()]
    assert labels == [-100 if position == 0 else token for token, position in zip(ids, positions, strict=True)]


def test_packed_data_go_on_where_they_were():
    data = [list(range(10 * number, 10 * number + 3 + number % 5)) for number in range(40)]
    for make in (lambda: recycle.pack(data, 6, seed=4), lambda: recycle.pack(Texts(30), 6)):
        shape = Shape(2, 2, 1)
        source = micro_batches_of(make(), shape, 2, 3, DataOptions(repeats=True))
        read = {}
        for address in product(range(9), range(2), range(1)):
            read[address] = source.get(*address)[0]["input_ids"].tolist()
            source.keep_positions(source.positions_after(*address))
        resumed = micro_batches_of(make(), shape, 2, 3, DataOptions(repeats=True))
        resumed.restart(source.positions_at(7))
        assert {address: resumed.get(*address)[0]["input_ids"].tolist() for address in read if address[0] >= 7} == {
            address: rows for address, rows in read.items() if address[0] >= 7
        }


def test_a_pass_over_packed_data_has_every_token_once_but_those_that_fill_no_sample():
    data = [[number] * 3 for number in range(20)]
    source = micro_batches_of(recycle.pack(data, 5), Shape(1, 1, 1), 1, 3, DataOptions())
    counts = Counter(token for step in range(12) for token in source.get(step, 0, 0)[0]["input_ids"].flatten().tolist())
    assert counts == dict.fromkeys(range(20), 3)
    with pytest.raises(DataFailed, match="the stream ended after 12 samples"):
        source.get(12, 0, 0)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"text": "a"}, "a sequence to pack has no 'input_ids', but text"),
        ({"input_ids": [1, 2], "labels": [1]}, "a sequence to pack has 2 tokens, but 1 labels"),
        ("ab", "a sequence to pack is a str, but it must be a list of token ids"),
    ],
)
def test_what_cannot_be_packed_is_told(row, sentence):
    with pytest.raises(UserError, match=sentence):
        list(recycle.pack([row], 2))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: DataOptions(-1), "the number of loader processes is -1, but it must be a whole number of at least 0"),
        (lambda: DataOptions(ahead=0), "the number of micro-batches that a loader process makes ahead is 0"),
        (lambda: DataOptions(timeout_s=0), "timeout_s of the data is 0, but it must be a finite number of seconds above 0"),
        (
            lambda: DataOptions(order="random"),
            "the order of samples is 'random', but it must be shuffled, sequential or a function",
        ),
        (lambda: DataOptions(collate=3), "collate is a int, but it must be a function"),
        (lambda: Padding(0), "the longest length of a sample is 0"),
        (lambda: Padding(10, multiple_of=4), "max_length is 10, but lengths are rounded up to multiples of 4"),
        (lambda: recycle.pack([[1]], 0), "the length of packed samples is 0"),
    ],
)
def test_options_that_cannot_be_used_are_refused(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()
