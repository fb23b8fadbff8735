"""Hypothesis tries new examples on every run of ours, and the same ones on every run of CI, so that a red CI means a change."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
