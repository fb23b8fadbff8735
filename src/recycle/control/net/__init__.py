"""The control connection: framing, handshake, the coordinator's server, the worker's client, file transfer.

Imports core and control.decide.
"""
