"""Predicted against measured: schedules side by side on real hardware, and runs beside their simulation.

Imports every room but the command line.
"""
