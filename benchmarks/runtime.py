"""How fast the runtime is: a fault-free step beside that of torch.distributed.pipelining, in the same processes, in turns.

Both train the same GPT on the same micro-batches with one thread a worker. Theirs plays its 1F1B schedule, then pipelines add up
their gradients and step; ours plays the plan that ReCycle makes for nobody dead, and keeps what it needs to take a step back.
A round is some iterations of one and some of the other, each between two barriers; what counts is the median of their ratios.

    python benchmarks/runtime.py [--rounds 7] [--iterations 4] [--json]
"""

import argparse
import copy
import json
import multiprocessing
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import recycle
from recycle.models.gpt import GptConfig, gpt_stages, next_byte_loss
from recycle.models.text import Text
from recycle.runtime.batches import Batches
from recycle.runtime.job import Job, Settings
from recycle.runtime.launch import assignments
from recycle.runtime.links import GlooLinks
from recycle.runtime.worker import Assignment, make_trainer

CONTEXT, SAMPLES, SEED = 128, 2, 1
CASES = [
    # pipelines, stages, micro-batches, width, layers
    (1, 2, 8, 128, 4),
    (1, 4, 8, 128, 8),
    (2, 2, 4, 128, 4),
    (3, 4, 6, 64, 8),
]


@dataclass(frozen=True)
class Case:
    pipelines: int
    stages: int
    microbatches: int
    width: int
    layers: int

    def job(self) -> Job:
        plan = recycle.solve(recycle.problem(self.pipelines, self.stages, self.microbatches, costs=(10, 13, 9)), "greedy")
        model = GptConfig(context=CONTEXT, width=self.width, num_layers=self.layers)
        samples = Batches(Text(CONTEXT), plan.problem.shape, SAMPLES, SEED)
        stages = gpt_stages(model, self.stages, SEED)
        return Job(plan, stages, samples, next_byte_loss, partial(torch.optim.AdamW, lr=1e-3), Settings(10**6, SEED))


class Ours:
    """A worker of ReCycle."""

    def __init__(self, given: Assignment, store: Any) -> None:
        module = copy.deepcopy(given.module)
        links = GlooLinks(store, given.address, given.parcels, given.shape.num_chains, given.ties, timedelta(seconds=120))
        self._trainer = make_trainer(given, module, links)
        self._done = 0

    def run(self, num_iterations: int) -> None:
        self._trainer.train(self._done, self._done + num_iterations, lambda *told: None)
        self._done += num_iterations


class Theirs:
    """The same worker by torch.distributed.pipelining, with plain data parallelism around it."""

    def __init__(self, given: Assignment, store: Any) -> None:
        worker, shape = given.worker, given.shape
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("theirs", store), rank=rank_of(given), world_size=len(given.address.workers)
        )
        pipes = [dist.new_group([p * shape.num_stages + s for s in range(shape.num_stages)]) for p in range(shape.num_pipelines)]
        peers = [dist.new_group([p * shape.num_stages + s for p in range(shape.num_pipelines)]) for s in range(shape.num_stages)]
        self._given, self._peers, self._num_peers = given, peers[worker.stage], shape.num_pipelines
        module = copy.deepcopy(given.module)
        self._parameters = list(module.parameters())
        stage = PipelineStage(module, worker.stage, shape.num_stages, torch.device("cpu"), group=pipes[worker.pipeline])
        self._schedule = Schedule1F1B(stage, shape.num_microbatches, loss_fn=next_byte_loss)
        self._optimizer = given.make_optimizer(self._parameters)
        self._done = 0

    def run(self, num_iterations: int) -> None:
        for _ in range(num_iterations):
            self._step()
            self._done += 1

    def _step(self) -> None:
        worker, shape = self._given.worker, self._given.shape
        is_first, is_last = worker.stage == 0, worker.stage == shape.num_stages - 1
        inputs, targets = self._data() if is_first or is_last else (None, None)
        losses: list[Tensor] = []
        given = {"target": targets, "losses": losses} if is_last else {}
        self._schedule.step(*([inputs] if is_first else []), **given)
        if self._num_peers > 1:
            flat = torch.cat([parameter.grad.flatten() for parameter in self._parameters if parameter.grad is not None])
            dist.all_reduce(flat, group=self._peers)
            flat /= self._num_peers
            at = 0
            for parameter in self._parameters:
                parameter.grad = flat[at : at + parameter.numel()].view(parameter.shape)
                at += parameter.numel()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _data(self) -> tuple[Tensor, Tensor]:
        parts = [
            self._given.samples.get(self._done, self._given.worker.pipeline, index)
            for index in range(self._given.shape.num_microbatches)
        ]
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def rank_of(given: Assignment) -> int:
    return given.worker.pipeline * given.shape.num_stages + given.worker.stage


def race(given: Assignment, rounds: int, num_iterations: int, results: Any) -> None:
    """One worker of a race; the first tells the times."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", given.store_port, is_master=False)
    theirs, ours = Theirs(given, store), Ours(given, store)
    for runner in (theirs, ours):
        runner.run(2)
    for _ in range(rounds):
        times = []
        for runner in (ours, theirs):
            dist.barrier()
            start = time.perf_counter()
            runner.run(num_iterations)
            dist.barrier()
            times.append((time.perf_counter() - start) / num_iterations)
        if rank_of(given) == 0:
            results.put(times)
    dist.barrier()
    dist.destroy_process_group()


def compare(case: Case, rounds: int, num_iterations: int) -> list[list[float]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["recycle.runtime.preload", "torch.distributed.pipelining"])
    results = context.Queue()
    processes = [
        context.Process(target=race, args=(given, rounds, num_iterations, results), daemon=True)
        for given in assignments(case.job(), store.port)
    ]
    for process in processes:
        process.start()
    times = [results.get(timeout=600) for _ in range(rounds)]
    for process in processes:
        process.join()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--case", type=int, help="only this one, from 0")
    args = parser.parse_args()
    for number, sizes in enumerate(CASES):
        if args.case is not None and args.case != number:
            continue
        times = compare(Case(*sizes), args.rounds, args.iterations)
        ratios = [ours / theirs for ours, theirs in times]
        print(
            sizes,
            "ours",
            round(median(o for o, _ in times) * 1e3, 1),
            "theirs",
            round(median(t for _, t in times) * 1e3, 1),
            "ratio",
            round(median(ratios), 3),
            [round(r, 2) for r in sorted(ratios)],
            flush=True,
        )


if __name__ == "__main__":
    main()
