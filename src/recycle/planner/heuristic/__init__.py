"""The greedy method: compiled list scheduling under many settings, improved by local search. Imports core and planner.model."""
