"""The mathematics of one stage: forward, split backward, gradient sums, optimizer step, micro-batches, seeds, digests.

Imports core and torch; it knows no other worker.
"""
