"""Drift: how fast each worker is, by the ops that it ran, and when another plan is worth its change. Pure, and without a clock.

Imports core alone.
"""
