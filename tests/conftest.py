"""Settings of every test: where Hypothesis takes its examples from, and how interrupts arrive."""

import os
import signal

from hypothesis import settings

# Hypothesis tries new examples on every run of ours, and the same ones on every run of CI, so that a red CI means a change.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

# nohup, a shell's background job and many job runners start processes with SIGINT ignored, and children inherit that. Tests of
# Ctrl-C need the default: Python raises KeyboardInterrupt, and a child begins with its own default handler.
signal.signal(signal.SIGINT, signal.default_int_handler)
