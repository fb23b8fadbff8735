"""Measurements on real hardware: the same workers train by several schedules in turn. Needs torch and standard library only."""
