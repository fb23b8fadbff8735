"""Text forms of quantities: bytes (`80GiB`), shares (`25%`), microseconds (`1.204 s`)."""

import math
import re

from recycle.core.errors import UserError

_BYTE_UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


def is_bytes(text: str) -> bool:
    """Say whether `text` is a number with a byte unit."""
    match = _BYTES.fullmatch(text.strip())
    return bool(match) and match[2] in _BYTE_UNITS  # type: ignore[index]


def parse_bytes(text: str) -> int:
    """Return the bytes that a text such as `80GiB` stands for."""
    match = _BYTES.fullmatch(text.strip())
    size = float(match[1]) * _BYTE_UNITS[match[2]] if match and match[2] in _BYTE_UNITS else math.inf
    if not math.isfinite(size):
        raise UserError(f"{text!r} is not a size: write a number and a unit, such as 80GiB or 512MiB")
    return round(size)


def format_bytes(size_bytes: int) -> str:
    """Return `size_bytes` in the largest binary unit that keeps it at or above one."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes >= _BYTE_UNITS[unit]:
            return f"{size_bytes / _BYTE_UNITS[unit]:.1f} {unit}"
    return f"{size_bytes} B"


def format_us(time_us: int) -> str:
    """Return a time with the unit that reads best."""
    if time_us >= 1_000_000:
        return f"{time_us / 1e6:.3f} s"
    return f"{time_us / 1e3:.2f} ms" if time_us >= 10_000 else f"{time_us} µs"


def parse_share_or_count(text: str, whole: int) -> int:
    """Return a count given as `12` or as a share of `whole`, such as `25%` (rounded down)."""
    body = text.strip()
    try:
        value = float(body[:-1]) / 100 * whole if body.endswith("%") else float(int(body))
    except (ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise UserError(f"{text!r} is neither a count nor a share: write a number such as 12, or 25%")
    return int(value + 1e-9)
