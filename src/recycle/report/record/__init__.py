"""The record of a run in numbers: columns, executed iterations, summary, metrics, recoveries, tables, facts. Imports core."""
