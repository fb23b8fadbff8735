"""Which GPUs an agent takes: all, none, or those that a user names, and none that others use."""

import pytest

from recycle.core.errors import UserError
from recycle.runtime.launch.gpus import Gpu, choose_gpus, hold

FREE = [Gpu(f"GPU-{number}{number}", "H200", 139 << 30, 140 << 30) for number in range(3)]
TAKEN = Gpu("GPU-99", "H200", 10 << 30, 140 << 30)


@pytest.mark.parametrize(
    ("wanted", "numbers"), [("all", [0, 1, 2]), ("none", []), ("2", [2]), ("GPU-11, 0", [1, 0]), ("0,1,2", [0, 1, 2])]
)
def test_a_user_names_gpus_by_number_or_uuid(wanted, numbers):
    assert choose_gpus(FREE, wanted) == [FREE[number] for number in numbers]


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("3", r"this machine has no GPU 3; it has 0 \(GPU-00\), 1 \(GPU-11\), 2 \(GPU-22\)"),
        ("GPU-0", r"this machine has no GPU GPU-0; it has"),
        ("", r"this machine has no GPU ; it has"),
        ("1,GPU-11", r"a GPU is named twice in 1,GPU-11"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(wanted, says):
    with pytest.raises(UserError, match=says):
        choose_gpus(FREE, wanted)


def test_a_machine_without_gpus_has_none():
    assert choose_gpus([], "all") == []
    with pytest.raises(UserError, match="this machine has no GPU 0; it has none"):
        choose_gpus([], "0")


def test_a_gpu_whose_memory_others_use_is_refused_unless_it_is_not_wanted():
    with pytest.raises(
        UserError, match=r"GPU-99 \(H200\) is in use: 10.0 of 140.0 GiB are free; end what uses it, or name others"
    ):
        choose_gpus([*FREE, TAKEN], "all")
    assert choose_gpus([*FREE, TAKEN], "0,1") == FREE[:2]


def test_a_gpu_of_another_agent_is_refused_until_that_ends():
    with (
        hold(FREE[0]),
        hold(FREE[1]),
        pytest.raises(UserError, match=r"GPU-00 \(H200\) is in use: another agent on this machine"),
    ):
        hold(FREE[0])
    hold(FREE[0]).close()
