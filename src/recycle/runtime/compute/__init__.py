"""The mathematics of one stage: forward, split backward, gradient sums, optimizer step, micro-batches, seeds, digests.

Imports core and torch; nothing here communicates with other workers.
"""
