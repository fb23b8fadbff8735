"""A plan played op by op: a second opinion on what it promises."""
