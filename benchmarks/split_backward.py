"""Split backward on a GPU: I and W beside autograd's fused backward pass and beside PyTorch's own split, by device time.

python benchmarks/split_backward.py                    the three transformer stages, in bf16, as a table
python benchmarks/split_backward.py --json FILE        also writes the numbers

It needs torch and a CUDA GPU, and nothing else: on a machine where nothing is installed, PYTHONPATH=src is enough.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from recycle.models.gpt import GptConfig, GptStage
from recycle.runtime.compute.gradients import FloatSums
from recycle.runtime.compute.split_backward import Tape, defer_weights

SEQUENCE, REPETITIONS, WARM_UPS = 2048, 20, 5
TARGET = 0.97
HEAD_START_CYCLES = 20_000_000
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Size:
    """The middle stage of a GPT."""

    width: int
    layers: int
    microbatch: int

    @property
    def name(self) -> str:
        return f"{self.width}/{self.layers}/{self.microbatch}"

    def stage(self) -> nn.Module:
        config = GptConfig(context=SEQUENCE, width=self.width, num_heads=self.width // 128, num_layers=self.layers + 2)
        return GptStage(config, range(1, self.layers + 1), seed=1).to("cuda", torch.bfloat16)

    def inputs(self) -> tuple[Tensor, Tensor]:
        shape = (self.microbatch, SEQUENCE, self.width)
        generator = torch.Generator("cuda").manual_seed(3)
        made = torch.randn(2, *shape, device="cuda", generator=generator).to(torch.bfloat16)
        return made[0], made[1] / 100


SIZES = (Size(1024, 6, 8), Size(3072, 4, 2), Size(4096, 4, 2))


@dataclass(frozen=True, slots=True)
class Taken:
    """What a pass takes, in ms: of the device, and of the host until all is launched."""

    device_ms: float
    host_ms: float


class Race:
    """The ways to run one stage backward. Each adds the gradients of a micro-batch to those it has."""

    def __init__(self, size: Size) -> None:
        self.x, self.dy = size.inputs()
        self.theirs, self.split, self.ours = size.stage(), size.stage(), size.stage()
        self.sums = FloatSums(self.ours.parameters(), torch.bfloat16)
        self.deferral = defer_weights(self.ours)
        self.held_bytes = self.needed_bytes = 0

    def _forward(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        x = self.x.detach().requires_grad_(True)
        return x, module(x)

    def fused(self) -> Iterator[str]:
        """autograd's own backward pass, which accumulates into .grad."""
        _, made = self._forward(self.theirs)
        yield "B"
        torch.autograd.backward([made], [self.dy])
        yield ""

    def torch_split(self) -> Iterator[str]:
        """The split of torch.distributed.pipelining's zero-bubble schedules."""
        x, made = self._forward(self.split)
        yield "I"
        _, groups = stage_backward_input([made], [self.dy], [x], self.split.parameters())
        yield "W"
        stage_backward_weight(self.split.parameters(), groups)
        yield ""

    def our_split(self) -> Iterator[str]:
        x, made = self._forward(self.ours)
        tape = Tape()
        before = torch.cuda.memory_allocated()
        yield "I"
        with self.deferral.use(tape):
            torch.autograd.backward([made], [self.dy])
        made = None  # type: ignore[assignment]
        rest = [parameter for parameter in self.ours.parameters() if parameter.grad is not None]
        self.sums.add(rest, [parameter.grad for parameter in rest if parameter.grad is not None])
        for parameter in rest:
            parameter.grad = None
        yield "W"
        self.needed_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in tape.storages()}.values())
        self.held_bytes = torch.cuda.memory_allocated() - self.empty_bytes
        tape.play(self.sums)
        yield ""
        del x, before

    empty_bytes = 0

    def take(self, way: Callable[[], Iterator[str]]) -> dict[str, Taken]:
        """Run one way once, and time its parts."""
        found: dict[str, Taken] = {}
        torch.cuda.synchronize()
        self.empty_bytes = torch.cuda.memory_allocated()
        steps = way()
        part = next(steps)
        torch.cuda.synchronize()
        while part:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            # In a pipeline the device is never done before the host has launched what follows.
            torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
            begin.record()
            start_s = time.perf_counter()
            following = next(steps)
            host_ms = (time.perf_counter() - start_s) * 1e3
            end.record()
            torch.cuda.synchronize()
            found[part] = Taken(begin.elapsed_time(end), host_ms)
            part = following
        return found

    def difference(self) -> float:
        """The largest difference of a gradient from autograd's, in its own norm."""
        self.theirs.zero_grad()
        self.sums.clear()
        self.take(self.fused)
        self.take(self.our_split)
        return max(_distance(self.sums.of(own)[0], other.grad) for own, other in _pairs(self.ours, self.theirs))


def _pairs(one: nn.Module, other: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(one.parameters(), other.parameters(), strict=True)


def _distance(one: Tensor, other: Tensor | None) -> float:
    assert other is not None
    return float((one.double() - other.double()).norm() / other.double().norm())


def race(size: Size) -> dict[str, object]:
    made = Race(size)
    ways = {"fused": made.fused, "torch": made.torch_split, "ours": made.our_split}
    found: dict[str, list[Taken]] = {}
    difference = made.difference()
    for repetition in range(WARM_UPS + REPETITIONS):
        for name, way in ways.items():
            for part, taken in made.take(way).items():
                if repetition >= WARM_UPS:
                    found.setdefault(f"{name} {part}", []).append(taken)
    device = {name: median(one.device_ms for one in taken) for name, taken in found.items()}
    host = {name: median(one.host_ms for one in taken) for name, taken in found.items()}
    fused = [one.device_ms for one in found["fused B"]]
    return {
        "stage": asdict(size),
        "device_ms": device,
        "host_ms": host,
        "ours_over_fused": median(_ratios(found, "ours", fused)),
        "torch_over_fused": median(_ratios(found, "torch", fused)),
        "difference": difference,
        "held_mib": made.held_bytes / MIB,
        "needed_mib": made.needed_bytes / MIB,
    }


def _ratios(found: dict[str, list[Taken]], name: str, fused: list[float]) -> list[float]:
    """I + W over B, each beside the one of its own repetition."""
    parts = zip(found[f"{name} I"], found[f"{name} W"], fused, strict=True)
    return [(one.device_ms + other.device_ms) / whole for one, other, whole in parts]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the split backward pass beside the fused one, on a GPU.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, sequence {SEQUENCE}, median of {REPETITIONS}")
    print("width/layers/micro-batch   B ms   I ms   W ms   I+W/B   torch's   host I  host W ms   held MiB of needed   difference")
    results = []
    for size in SIZES:
        found = race(size)
        results.append(found)
        device, host = found["device_ms"], found["host_ms"]
        assert isinstance(device, dict)
        assert isinstance(host, dict)
        print(
            f"{size.name:<25} {device['fused B']:6.2f} {device['ours I']:6.2f} {device['ours W']:6.2f} "
            f"{found['ours_over_fused']:7.3f} {found['torch_over_fused']:9.3f} {host['ours I']:8.2f} "
            f"{host['ours W']:7.2f} {found['held_mib']:13.0f} {found['needed_mib']:7.0f} {found['difference']:13.1e}",
            flush=True,
        )
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(float(str(found["ours_over_fused"])) > TARGET for found in results))


if __name__ == "__main__":
    sys.exit(main())
