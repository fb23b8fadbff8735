"""Streams by address: any reader gets the same samples, from any known position, each once."""

from collections import Counter
from itertools import product

import datasets
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from recycle.core.cluster import Shape
from recycle.core.errors import DataFailed, FileProblem, UserError
from recycle.runtime.data.data_options import DataOptions
from recycle.runtime.data.make_source import micro_batches_of
from recycle.runtime.data.read_ahead import ReadAhead
from recycle.runtime.data.stream_batches import StreamBatches, positions_from_json, positions_to_json
from recycle.runtime.data.streams import StreamPosition
from recycle.runtime.data.torch_loaders import is_loader, unwrapped

torch.set_num_threads(1)
datasets.disable_progress_bars()
SHAPE, BATCH = Shape(2, 2, 3), 2


class Plain:
    """A stream without a state; it counts what is read of it."""

    def __init__(self, num_samples=120):
        self.num_samples, self.num_read = num_samples, 0

    def __iter__(self):
        for number in range(self.num_samples):
            self.num_read += 1
            yield torch.tensor([number]), torch.rand(1)


class OwnIterator:
    """A stream whose iterators have the state."""

    def __init__(self, num_samples=120):
        self.num_samples = num_samples

    def __iter__(self):
        return _Numbers(self.num_samples)


class _Numbers:
    def __init__(self, stop):
        self.next, self.stop = 0, stop

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == self.stop:
            raise StopIteration
        self.next += 1
        return torch.tensor([self.next - 1]), torch.rand(1)

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def hugging_face(num_shards):
    rows = datasets.Dataset.from_dict({"x": [[number] for number in range(120)], "labels": list(range(120))})
    return rows.to_iterable_dataset(num_shards=num_shards).map(lambda row: {"x": row["x"], "labels": row["labels"]})


STREAMS = {
    "plain": (Plain, 1),
    "own iterator": (OwnIterator, 1),
    "Hugging Face": (lambda: hugging_face(6), 6),
    "Hugging Face, few shards": (lambda: hugging_face(4), 2),
    "Hugging Face, shuffled": (lambda: hugging_face(6).shuffle(seed=3, buffer_size=7), 6),
    "stateful loader": (lambda: StatefulDataLoader(hugging_face(6), batch_size=BATCH, num_workers=0), 6),
}


def batches(dataset, repeats=False):
    options = DataOptions(repeats=repeats)
    if is_loader(dataset):
        dataset, _, options = unwrapped(dataset, BATCH, options)
    return micro_batches_of(dataset, SHAPE, BATCH, 5, options)


def addresses(steps):
    return list(product(steps, range(SHAPE.num_pipelines), range(SHAPE.num_microbatches)))


def numbers_of(made):
    inputs = made[0]
    return [int(number) for number in (inputs["x"] if isinstance(inputs, dict) else inputs).flatten()]


def all_read(source, steps):
    return {address: numbers_of(source.get(*address)) for address in addresses(steps)}


@pytest.fixture(params=STREAMS, ids=str)
def stream(request):
    make, num_parts = STREAMS[request.param]
    return make, num_parts


def test_every_sample_of_a_stream_comes_once(stream):
    make, num_parts = stream
    source = batches(make())
    assert source.num_parts == num_parts
    counts = Counter(number for numbers in all_read(source, range(10)).values() for number in numbers)
    assert counts == dict.fromkeys(range(120), 1)


def test_a_reader_that_begins_anywhere_reads_the_same(stream):
    make, _ = stream
    first = batches(make())
    expected = {}
    for address in addresses(range(6)):
        expected[address] = numbers_of(first.get(*address))
        first.keep_positions(first.positions_after(*address))
    for address in [(5, 1, 2), (5, 0, 0), (4, 1, 0), (3, 0, 1), (1, 1, 1), (0, 0, 0)]:
        other = batches(make())
        assert numbers_of(other.get(*address)) == expected[address]
        other = batches(make())
        other.keep_positions(positions_from_json(positions_to_json(first.known_positions())))
        assert numbers_of(other.get(*address)) == expected[address]


def test_positions_of_a_checkpoint_are_before_its_next_step(stream):
    make, num_parts = stream
    source = batches(make())
    for address in addresses(range(5)):
        source.get(*address)
        source.keep_positions(source.positions_after(*address))
    at = source.positions_at(3)
    assert sorted(at) == list(range(num_parts))
    resumed = batches(make())
    resumed.restart(at)
    assert all_read(resumed, range(3, 5)) == all_read(batches(make()), range(3, 5))


def test_a_state_spares_reading_again_and_the_lack_of_one_is_told():
    for make, num_again in ((Plain, 0), (OwnIterator, 0), (lambda: Plain(1000), 588)):
        source = batches(make())
        if num_again:
            for address in addresses(range(50)):
                source.get(*address)
                source.keep_positions(source.positions_after(*address))
        assert source.num_again(49 if num_again else 1, [(0, 0), (1, 2)]) == num_again


def test_a_plain_stream_is_read_again_from_its_beginning_only_where_it_must():
    data = Plain()
    source = batches(data)
    all_read(source, range(4))
    assert data.num_read == 4 * SHAPE.num_chains * BATCH
    source.get(2, 0, 0)
    assert data.num_read == (4 + 2) * SHAPE.num_chains * BATCH + BATCH


def test_loader_processes_read_streams_part_by_part():
    make = STREAMS["Hugging Face"][0]
    expected = all_read(batches(make()), range(4))
    places, source = [(0, 1), (1, 2), (0, 0), (1, 0)], batches(make())
    reader = ReadAhead(source, DataOptions(3), places, range(4), (True, True), None, lambda has_moved: None)
    made = {(step, *place): numbers_of(reader.get(step, *place)) for step in range(4) for place in places}
    reader.close()
    assert made == {address: expected[address] for address in made}
    assert sorted(source.positions_at(4)) == sorted(source.part_of(*place) for place in places)


@pytest.mark.parametrize("make", [lambda: Plain(50), lambda: hugging_face(6)], ids=["plain", "Hugging Face"])
def test_a_stream_that_repeats_gives_every_sample_once_a_pass(make):
    source = batches(make(), repeats=True)
    read = all_read(source, range(25))
    counts = Counter(number for numbers in read.values() for number in numbers)
    assert max(counts.values()) - min(counts.values()) <= 1
    first = batches(make(), repeats=True)
    for address in addresses(range(22)):
        first.get(*address)
        first.keep_positions(first.positions_after(*address))
    resumed = batches(make(), repeats=True)
    resumed.restart(first.positions_at(21))
    assert all_read(resumed, range(21, 25)) == {address: read[address] for address in addresses(range(21, 25))}


def test_a_stream_that_ends_early_is_told_in_a_sentence():
    source = batches(Plain(40))
    with pytest.raises(
        DataFailed, match=r"^the stream ended after 40 samples, 20 micro-batches: give more data, train for fewer"
    ):
        all_read(source, range(10))
    with pytest.raises(DataFailed, match=r"^the stream is empty: give data"):
        batches(Plain(0), repeats=True).get(0, 0, 0)


def test_a_sample_of_a_stream_that_raises_is_named():
    class Broken(Plain):
        def __iter__(self):
            yield torch.zeros(1), torch.zeros(1)
            raise OSError("the disk is gone")

    with pytest.raises(
        DataFailed, match=r"^sample 1 of the stream raised OSError in test_streams.py, line \d+: the disk is gone"
    ):
        batches(Broken()).get(0, 0, 0)


def test_what_can_be_read_only_once_is_refused():
    with pytest.raises(UserError, match="is a generator, which can be read once only, but a worker that takes over must read"):
        batches(each for each in range(3))


def test_a_stream_that_was_restored_to_a_position_is_refused():
    rows = hugging_face(6)
    next(iter(rows))
    restored = hugging_face(6)
    restored.load_state_dict(rows.state_dict())
    loader = StatefulDataLoader(hugging_face(6), batch_size=BATCH)
    next(iter(loader))
    of_loader = StatefulDataLoader(hugging_face(6), batch_size=BATCH)
    of_loader.load_state_dict(loader.state_dict())
    for data in (restored, of_loader):
        with pytest.raises(UserError, match="was restored to a position with load_state_dict, but a run begins"):
            batches(data)


def test_a_state_that_cannot_be_read_safely_is_left_out():
    class Odd:
        pass

    assert StreamPosition.parse(StreamPosition(3, 1, 4, {"x": [1, "a", None], "t": torch.ones(2)}).to_text()).state["x"] == [
        1,
        "a",
        None,
    ]
    assert StreamPosition.parse(StreamPosition(3, 1, 4, {"x": Odd()}).to_text()) == StreamPosition(3, 1, 4, None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@",
        "AAAA",
        "bm8=",
        "[2, 0, 0, 0, null]",
        "[1, -1, 0, 0, null]",
        "[1, 2]",
        StreamPosition(1, state=torch.ones(1)).to_text()[:-8],
    ],
)
def test_a_position_that_was_changed_is_refused(text):
    with pytest.raises(FileProblem, match="the position in a stream cannot be read"):
        StreamPosition.parse(text)


@pytest.mark.parametrize("form", ["[", "[1]", {"a": {}}, {"1": {"b": "c"}}, {"1": 3}, None])
def test_positions_that_were_changed_are_refused(form):
    with pytest.raises(FileProblem, match="the positions in the streams of a run cannot be read"):
        positions_from_json(form)


def test_the_order_of_a_stream_does_not_depend_on_who_has_how_many_pipelines():
    """As with map-style data, a step has the same micro-batches in another shape of as many."""
    make = STREAMS["Hugging Face"][0]
    orders = []
    for shape in (Shape(2, 2, 3), Shape(3, 4, 2), Shape(6, 1, 1)):
        source = StreamBatches(make(), shape, BATCH, 5)
        places = list(product(range(shape.num_pipelines), range(shape.num_microbatches)))
        orders.append([[numbers_of(source.get(step, *place)) for place in places] for step in range(3)])
    assert orders[0] == orders[1] == orders[2]
