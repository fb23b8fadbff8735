"""Oobleck: pipeline templates, the choice of a multiset of them, and the policy after failures."""
