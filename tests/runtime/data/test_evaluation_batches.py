"""The micro-batches of evaluation data that are a stream."""

import pytest
import torch

from recycle.runtime.data.data_options import DataOptions
from recycle.runtime.data.evaluation_batches import evaluation_batches_of
from recycle.runtime.data.joining import make_join
from tests.runtime.data_runs import Counted, Stateful, hugging_face, joined_rows


class Numbers:
    """A stream of numbers, which notes those that were read. Each has a random number beside it."""

    def __init__(self):
        self.read = []

    def __iter__(self):
        for number in range(100):
            self.read.append(number)
            yield torch.tensor(number), torch.rand(())


def batches(stream):
    return evaluation_batches_of(stream, 19, 2, 4, None)


def test_any_order_within_a_round_gives_the_same_samples_and_reads_each_once():
    in_order = {number: batches(Numbers())[number] for number in range(9)}
    assert [inputs.tolist() for inputs, _ in in_order.values()] == [[number, number + 1] for number in range(0, 18, 2)]
    stream = Numbers()
    made = batches(stream)
    for _ in range(2):  # two evaluations
        stream.read.clear()
        for number in (2, 0, 3, 1, 7, 5, 8):
            for made_part, part in zip(made[number], in_order[number], strict=True):
                assert torch.equal(made_part, part)
        assert stream.read == list(range(18))


def test_an_evaluation_that_is_begun_again_after_a_part_of_a_round_gives_the_same_samples():
    made = batches(Numbers())
    for number in (1, 0, 5, 1, 0, 3, 2):
        assert made[number][0].tolist() == [2 * number, 2 * number + 1]


@pytest.mark.parametrize("make", [Counted, Stateful, hugging_face])
def test_every_evaluation_reads_the_beginning_of_a_stream_of_any_kind(make):
    join, stream = make_join(DataOptions(collate=joined_rows)) if make is hugging_face else None, make()
    alone = [evaluation_batches_of(make(), 12, 3, 2, join)[number] for number in range(4)]
    made = evaluation_batches_of(stream, 12, 3, 2, join)
    for number in (0, 1, 3, 0, 2, 1, 0, 1, 2, 3):
        for made_part, part in zip(made[number], alone[number], strict=True):
            assert torch.equal(made_part, part)
    assert not torch.equal(alone[0][0], alone[1][0])
