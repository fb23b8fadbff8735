"""What every planning method shares: the schedule arrays, the lower bound of the period, the routing of micro-batches. Imports core."""
