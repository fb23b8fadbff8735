"""Matplotlib figures of runs, recoveries, traces and campaigns. Imports core and report.{timeline,record,render}."""
