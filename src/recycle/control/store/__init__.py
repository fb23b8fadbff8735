"""Where the journal and the leader of a job are kept: a file for one machine, etcd for several coordinators of one job.

Imports core and control.decide.
"""
