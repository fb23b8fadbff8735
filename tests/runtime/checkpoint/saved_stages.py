"""Saving and comparing small stages, for the tests of checkpoints."""

import torch
from torch import nn

from recycle.runtime.checkpoint.writer import StageWriter

FINGERPRINT = {
    "shape": {"pipelines": 2, "stages": 2, "microbatches": 4},
    "seed": 3,
    "names": ["0.weight", "0.bias"],
    "model": [{"w": [2]}, {"w": [2]}],
}


def small_stage(seed=0, width=4):
    """A module and its optimizer after one step, so that there is state to save."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(width, width), nn.Tanh())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    module(torch.ones(2, width)).sum().backward()
    optimizer.step()
    return module, optimizer


def report_of(folder, stage, num_steps, module, optimizer):
    """Save a stage as a worker does, and return its report when the file is written."""
    reports = []
    writer = StageWriter(folder, stage, reports.append)
    writer.save(num_steps, module, optimizer)
    writer.wait()
    (report,) = reports
    return report


def decided_by(checkpoints, report):
    """The one thing that a report decides, None if it decides nothing."""
    decided = checkpoints.add_report(report)
    assert len(decided) <= 1
    return decided[0] if decided else None


def save_all(checkpoints, folder, num_steps, num_stages=2, width=4):
    """Save small stages that differ by stage and step; return what the last report decided."""
    for stage in range(num_stages):
        decided = decided_by(checkpoints, report_of(folder, stage, num_steps, *small_stage(100 * num_steps + stage, width)))
    return decided


def bits(value):
    """A value whose equality is that of every bit, dtype and type."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), bytes(flat.view(torch.uint8).tolist())
    if isinstance(value, dict):
        return {key: bits(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [bits(part) for part in value]
    return type(value), repr(value)


def held(module, optimizer):
    return bits(dict(module.state_dict())), bits(optimizer.state_dict())


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())
