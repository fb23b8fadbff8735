"""The machine that a profile is measured on: its name, its cores and memory, and one thread to measure with."""

import contextlib
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

_CORES = Path("/sys/devices/system/cpu")


def machine_name(device: str) -> str:
    """The name of the GPU, or of the processor with its number of cores."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    return f"{_processor()}, {num_cores()} cores"


def num_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def a_core_each(num_workers: int) -> Sequence[int]:
    """A core for each of so many workers; none if there are fewer cores."""
    return cores[:num_workers] if num_workers <= len(cores := usable_cores()) else []


def usable_cores() -> Sequence[int]:
    """The cores that this process may use: first one thread of each physical core, as far as the system knows which those are."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return sorted(cores, key=lambda core: (_number_among_threads(core), core))


def _number_among_threads(core: int) -> int:
    """Which thread of its physical core this is, from 0 on."""
    with contextlib.suppress(OSError, ValueError):
        text = (_CORES / f"cpu{core}" / "topology" / "thread_siblings_list").read_text(encoding="utf-8")
        ranges = ([int(end) for end in part.split("-")] for part in text.strip().split(","))
        return sorted(each for ends in ranges for each in range(ends[0], ends[-1] + 1)).index(core)
    return 0


def worker_memory_bytes(device: str, num_workers: int) -> int:
    """The memory of a worker if so many share this machine: of its GPU, or its part of the memory that is available."""
    if device.startswith("cuda"):
        total: int = torch.cuda.get_device_properties(0).total_memory
        return total * torch.cuda.device_count() // max(num_workers, torch.cuda.device_count())
    return _available_bytes() // num_workers


def _available_bytes() -> int:
    """The memory of this machine that is not in use, where the system says it, or else all of it."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo", encoding="utf-8") as stream:
        for line in stream:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread, as in a worker."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _processor() -> str:
    """The processor's own name, where the system knows it."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as stream:
        for line in stream:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
