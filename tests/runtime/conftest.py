"""Settings of every test that trains."""

from tests.warm_processes import warm_context

# Before the first training starts a server without the planner.
warm_context()
