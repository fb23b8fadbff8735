"""Commands about plans: `plan`, `show`, `check`, `estimate`."""
