"""Checkpoints: the state of every stage written to a folder, and loaded from it bit for bit.

`StageWriter` (in the workers) writes stages, `CheckpointFolder` (in the coordinator) combines them into whole checkpoints.
`latest` finds the checkpoint to resume from, and `load_stage` (in the workers) loads it. `files` defines the layout on disk.
"""

from recycle.runtime.checkpoint.files import Checkpoint
from recycle.runtime.checkpoint.folder import CheckpointComplete, CheckpointFolder, CheckpointIncomplete
from recycle.runtime.checkpoint.resume import fetch_stage, latest, load, load_stage
from recycle.runtime.checkpoint.writer import StageNotSaved, StageSaved, StageWriter

__all__ = [
    "Checkpoint",
    "CheckpointComplete",
    "CheckpointFolder",
    "CheckpointIncomplete",
    "StageNotSaved",
    "StageSaved",
    "StageWriter",
    "fetch_stage",
    "latest",
    "load",
    "load_stage",
]
