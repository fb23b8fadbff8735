"""Discrete-event replay of one plan, op by op, and what it tells: time shares, memory, critical path, expected period."""
