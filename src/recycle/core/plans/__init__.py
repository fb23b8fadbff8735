"""Plans and what makes them legal: rows, rules, routes, libraries of plans, the protocol that supplies plans to a running job.

Imports the nouns of core only.
"""
