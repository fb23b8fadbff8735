"""The decisions of the coordinator, without sockets: membership, agreement, epochs. Only the journal touches the system.

Imports core.
"""
