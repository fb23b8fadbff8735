"""Tests of control.drift."""
