"""The paper's evaluation, made again: one file an experiment, each with its assumptions, ours beside the published numbers."""
