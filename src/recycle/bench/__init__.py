"""Measuring on real hardware: the same workers train by several schedules in turns. Needs torch and the standard library only."""
