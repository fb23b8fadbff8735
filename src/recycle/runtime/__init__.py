"""A plan and a trace in, a record out, for real: workers that play their rows with torch."""
