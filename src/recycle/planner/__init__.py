"""The planner: from a profile to a plan. It reads no clock but for the time limit, and no file but the plan library."""
