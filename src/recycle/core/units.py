"""Text forms of quantities: bytes (`80GiB`), shares (`25%`), microseconds (`1.204 s`), durations (`30m`, `1 h 30 min`)."""

import math
import re
from fractions import Fraction

from recycle.core.errors import UserError

_BYTE_UNITS = {
    "B": 1,
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", start=1)},
}
_BYTES = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_BYTE_UNITS)})")
_SECOND, _MINUTE, _HOUR, _DAY = 10**6, 60 * 10**6, 3600 * 10**6, 86400 * 10**6
_TIME_UNITS = {"ms": 1000, "s": _SECOND, "m": _MINUTE, "min": _MINUTE, "h": _HOUR, "d": _DAY}
_DURATION = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]+)", re.ASCII)
_LONGEST_DURATION_US = 100 * 365 * _DAY


def is_bytes(text: str) -> bool:
    return _BYTES.fullmatch(text.strip()) is not None


def parse_bytes(text: str) -> int:
    """Return the bytes that a text such as `80GiB` stands for."""
    match = _BYTES.fullmatch(text.strip())
    size = float(match[1]) * _BYTE_UNITS[match[2]] if match else math.inf
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


def parse_duration_us(text: str) -> int:
    """Return the microseconds that a text such as `30m`, `1.5h` or `2d` stands for."""
    match = _DURATION.fullmatch(text.strip())
    if not match or match[2] not in _TIME_UNITS:
        raise UserError(f"{text!r} is not a duration: write a number and one of ms, s, m, h, d, such as 45s, 30m or 1.5h")
    time_us = round(Fraction(match[1]) * _TIME_UNITS[match[2]])
    if time_us > _LONGEST_DURATION_US:
        raise UserError(f"{text!r} is longer than 100 years: that cannot be meant, give a shorter duration")
    return time_us


def format_duration(time_us: int) -> str:
    """Return a duration in one or two units: `45 s`, `1 h 30 min`, `12.5 d`; small parts of a long one are rounded off."""
    if 0 < time_us < _SECOND - _SECOND // 2000:
        return f"{time_us / 1000:.3g} ms" if time_us >= 1000 else f"{time_us} µs"
    if time_us < _MINUTE - _SECOND // 20:
        return f"{time_us / _SECOND:.3g} s"
    if time_us < _HOUR - _SECOND // 2:
        return _two_units(round(time_us / _SECOND), "min", "s")
    if time_us < 2 * _DAY - _MINUTE // 2:
        return _two_units(round(time_us / _MINUTE), "h", "min")
    return f"{time_us / _DAY:,.1f}".removesuffix(".0") + " d"


def _two_units(count: int, large: str, small: str) -> str:
    """Return a count of small units, of which 60 make a large one, without a part that is zero."""
    whole, rest = divmod(count, 60)
    return f"{whole} {large} {rest} {small}" if rest else f"{whole} {large}"


def count_text(count: int, noun: str) -> str:
    """Return `1 worker`, `2 workers`, `2 batches`."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{count} {noun if count == 1 else plural}"


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
