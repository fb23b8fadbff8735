"""Decisions without sockets: who is alive, where training resumes, which epoch follows. Pure but for the journal on disk.

Imports core and host.
"""
