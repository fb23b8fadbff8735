"""Advice for a cluster: every shape and system that fits, bounded, the promising ones simulated, the best named, with its rivals.

Data goes one way: question -> choices -> upper bounds -> search -> verdict -> advice. Imports the campaign and all above it.
"""
