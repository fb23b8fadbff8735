"""What is known of the machine: which cores workers may have."""

import os
from pathlib import Path

import pytest

from recycle.profiling import machine
from recycle.profiling.machine import a_core_each, usable_cores


@pytest.mark.parametrize(
    ("siblings", "first"),
    [
        ({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, [0, 2, 1, 3]),
        ({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, [0, 1, 2, 3]),
        ({core: str(core) for core in range(4)}, [0, 1, 2, 3]),
        ({}, [0, 1, 2, 3]),
        ({0: "?"}, [0, 1, 2, 3]),
    ],
)
def test_one_thread_of_each_physical_core_comes_first(
    siblings: dict[int, str], first: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for core, text in siblings.items():
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{text}\n")
    monkeypatch.setattr(machine, "_CORES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    assert usable_cores() == first
    assert a_core_each(3) == first[:3]
    assert a_core_each(5) == []
