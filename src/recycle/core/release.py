"""The version of this package, and a digest of its sources, which marks cached results of other sources as stale."""

import hashlib
from functools import cache
from pathlib import Path

RELEASE = "0.1.0"


@cache
def source_digest() -> str:
    """Return a digest of every source file of core, planner and simulator."""
    root = Path(__file__).parent.parent
    made = hashlib.sha256(RELEASE.encode())
    for folder in ("core", "planner", "sim"):
        for path in sorted((root / folder).rglob("*.py")):
            made.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return made.hexdigest()
