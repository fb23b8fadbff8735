"""Others' simulator, by its own rules, to hold our policies against theirs."""
