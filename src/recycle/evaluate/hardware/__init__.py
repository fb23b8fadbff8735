"""Measuring on real hardware: the same workers train by several schedules in turns. Needs torch and the standard library only."""

# More turns rather than longer ones: what a machine does beside lasts for a turn, and is another one in the next.
DEFAULT_ROUNDS, DEFAULT_ITERATIONS, DEFAULT_KILLS = 8, 3, 20
