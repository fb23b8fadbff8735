"""The micro-batches of evaluation data that are a stream."""

import torch

from recycle.runtime.data.evaluation_batches import evaluation_batches_of


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
