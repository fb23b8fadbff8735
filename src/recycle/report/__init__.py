"""Plans and records as pictures, traces and tables."""
