"""Profiles without a measurement: estimated from the numbers of a model and a GPU, with a catalog of known ones. Imports core."""
