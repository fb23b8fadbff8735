"""ReCycle: pipeline-parallel training that goes on when workers die."""

__version__ = "0.1.0"
