"""The decisions of the coordinator, without sockets: membership, agreement, epochs. Only the journal and the prefetched plans
touch the system. Imports core and host.
"""
