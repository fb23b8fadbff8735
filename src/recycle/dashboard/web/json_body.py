"""`json_body`: data as JSON that every browser reads. A number that is not finite, which JSON does not have, becomes null."""

import json
import math
from typing import Any


def json_body(data: Any) -> bytes:
    """Return the JSON of `data`; what is looked for in it are numbers that are not finite, and only if there are some."""
    try:
        return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return json.dumps(_finite(data), separators=(",", ":"), allow_nan=False).encode()


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, list | tuple) else data
