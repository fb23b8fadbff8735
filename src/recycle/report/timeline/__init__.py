"""Lanes of blocks over time, before a format is chosen: of a plan, of an executed iteration, of a failure. Imports core."""
