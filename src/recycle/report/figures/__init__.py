"""Matplotlib figures of runs, recoveries, traces and campaigns. Imports core and the rooms of report above this line."""
