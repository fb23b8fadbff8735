"""Matplotlib figures of runs, recoveries, traces and campaigns. Imports core and report.{record,timeline,render}."""
