"""Who is alive, and what happens next: coordinator, workers, and what they say to each other."""
