"""Exact methods: one model of the problem, solved by CP-SAT or by a MILP solver. Imports core and planner.model."""
