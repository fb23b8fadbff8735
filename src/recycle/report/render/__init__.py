"""Timelines as a terminal chart, SVG or PNG, in one layout and one palette. Imports core and report.timeline."""
