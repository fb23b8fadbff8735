"""Seeds by what is computed, never by who computes it: dropout is the same wherever a micro-batch runs."""

import hashlib


def seed_of(*parts: int | str) -> int:
    """Return a seed of 63 bits that depends on every part and on their order."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
