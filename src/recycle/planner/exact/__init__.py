"""Exact methods: one model of the problem, stated to CP-SAT and to a MILP solver. Imports core and planner.model."""
