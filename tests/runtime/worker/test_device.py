"""The device of a worker: what is set before its first use, and what happens if it cannot be used."""

import pytest
import torch

from recycle.runtime.options import AUTO, GLOO, IPC, NCCL, TrainOptions
from recycle.runtime.worker.device import may_use_nccl, select_device, warm_up
from recycle.runtime.worker.local_stage import CannotLoad


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine that seems to have two GPUs; the list gets those that are selected."""
    selected = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    return selected


@pytest.mark.parametrize(
    ("transport", "shares_gpus", "expected"),
    [(AUTO, False, True), (AUTO, True, False), (NCCL, False, True), (NCCL, True, True), (GLOO, False, False), (IPC, True, False)],
)
def test_a_process_is_prepared_for_nccl_only_if_that_may_be_chosen(two_gpus, transport, shares_gpus, expected):
    assert may_use_nccl(TrainOptions(device="cuda", transport=transport), shares_gpus) == expected


def test_on_a_cpu_nothing_is_prepared():
    assert not may_use_nccl(TrainOptions(transport=AUTO), shares_gpus=False)
    assert select_device(TrainOptions(), 5) == torch.device("cpu")


def test_workers_share_the_gpus_that_they_see(two_gpus):
    options = TrainOptions(device="cuda")
    assert [select_device(options, number) for number in range(3)] == [torch.device("cuda", number) for number in (0, 1, 0)]
    assert two_gpus == [torch.device("cuda", number) for number in (0, 1, 0)]


def test_a_worker_whose_gpu_cannot_be_used_says_why_in_one_sentence(two_gpus, monkeypatch):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.\nSee the documentation.")

    options = TrainOptions(device="cuda")
    for function in ("ones", "cuda.set_device"):
        with monkeypatch.context() as patched:
            patched.setattr(f"torch.{function}", refuse)
            with pytest.raises(CannotLoad, match=r"^its GPU cannot be used: CUDA out of memory\.$"):
                warm_up(options, 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(CannotLoad, match="torch finds no GPU here"):
        warm_up(options, 1)
    warm_up(TrainOptions(), 1)
