"""Predictions compared with measurements: schedules on real hardware, and training runs beside their simulation.

Imports every package but the command line.
"""
