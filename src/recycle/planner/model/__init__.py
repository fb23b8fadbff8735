"""What every planning method shares: schedule arrays, the lower bound of the period, routing of micro-batches. Imports core."""
