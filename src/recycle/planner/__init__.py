"""Profile in, plan out. Pure: no clock but the time limit, no file but the plan library."""
