"""Lanes of blocks over time, independent of the output format: of a plan, of an executed iteration. Imports core."""
