"""The version of this package, and a digest of its sources: what was computed by other sources is not taken for ours."""

import hashlib
from functools import cache
from pathlib import Path

RELEASE = "0.1.0"


@cache
def source_digest() -> str:
    """A digest of every source file of planner, simulator and what they stand on."""
    root = Path(__file__).parent.parent
    made = hashlib.sha256(RELEASE.encode())
    for folder in ("core", "planner", "sim"):
        for path in sorted((root / folder).rglob("*.py")):
            made.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return made.hexdigest()
