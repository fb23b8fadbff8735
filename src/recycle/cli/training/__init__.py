"""Training on this machine, `train`; the configuration of a training, the job made from it, metrics."""
