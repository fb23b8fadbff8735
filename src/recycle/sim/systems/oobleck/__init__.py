"""Oobleck (SOSP'23): its policy, its pipeline templates, and how it combines them. Imports what sim.systems may import."""
