"""Data of every planning method: schedule arrays, the lower bound of the period, routing of micro-batches. Imports core."""
