"""The coordinator process: its configuration, the service around `control.decide`, and the ledger of the run.

Imports core, host, control, and of runtime what describes a job and its reports. It computes nothing.
"""
