"""Commands that train: `train`, `coordinator`, `worker`; their configuration, the job made from it, metrics."""
