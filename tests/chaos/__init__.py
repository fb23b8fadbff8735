"""Chaos: failures at every point of a run and at random times, on real processes; the weights must be those of the twin."""
