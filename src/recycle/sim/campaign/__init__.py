"""Simulation of training systems over failure traces: nodes get places, a trace is simulated, many cases run in parallel.

Imports core, host and the rest of sim except reproduce.
"""
