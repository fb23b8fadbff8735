"""Callbacks of a run: the protocol, and the threads in which they are called. Imports core and the coordinator's summary."""
