"""The record of a run in numbers: columns, executed iterations, summary, metrics, tables. Imports core and report.timeline."""
