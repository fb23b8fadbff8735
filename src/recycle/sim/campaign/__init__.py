"""Systems simulated over failure traces: one trace, or many systems over the same traces. Imports core, host and the rest of sim
except reproduce and reference.
"""
