"""Plans, the rules of a legal plan, routes, libraries of plans, and the protocol that supplies plans to a running job."""
