"""`seed_of`: seeds that depend on iteration, micro-batch and stage, never on the worker, so that dropout is the same anywhere."""

import hashlib


def seed_of(*parts: int | str) -> int:
    """Return a seed of 63 bits that depends on every part and on the order of the parts."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
