"""Checkpoints: the state of every stage written to a folder, and loaded from it bit for bit.

`StageWriter` (in the workers) writes stages, `CheckpointFolder` (in the coordinator) combines them into whole checkpoints.
`latest` finds the checkpoint to resume from, and `load_stage` (in the workers) loads it. `files` defines the layout on disk.
"""
