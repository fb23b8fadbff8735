"""Imported by the fork server alone: it ignores SIGTERM, which a batch system sends to all processes of a job at once.

The fork server must stay while the job writes its last checkpoint. Processes that are forked from it set the default again.
"""

import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
