"""The text and dictionary forms of an entry of a catalog: a name, a name with changes, or all its values. Errors name the key."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from recycle.core.errors import UserError
from recycle.core.units import is_bytes, parse_bytes


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_Number = TypeVar("_Number", int, float)
_Spec = TypeVar("_Spec", bound=_Named)
SpecKeys = Mapping[str, tuple[str, Callable[[str, Any], Any]]]  # the field of each key, and the reader of its value


def read_spec(
    given: str | Mapping[str, Any], noun: str, catalog: Mapping[str, _Spec], keys: SpecKeys, optional: tuple[str, ...]
) -> tuple[_Spec | None, str, dict[str, Any]]:
    """Return the entry of the catalog that is named, if any, the name, and the fields that are given."""
    values = _pairs(given, noun)
    known = _known(catalog, values)
    name = str(values.pop("name", "custom"))
    if unknown := [str(key) for key in values if key not in keys]:
        raise UserError(f"{unknown[0]!r} is not a key of a {noun}: known are name, {', '.join(keys)}")
    fields = {keys[key][0]: keys[key][1](key, value) for key, value in values.items()}
    if known:
        return known, _changed(known.name, values), fields
    missing = [key for key in keys if key not in values and key not in optional]
    if missing and not fields:
        raise UserError(f"no {noun} is called {name!r}: choose from {', '.join(catalog)}, or give {', '.join(missing)}")
    if missing:
        raise UserError(f"the {noun} {name!r} lacks {', '.join(missing)}: give them, or start from one of {', '.join(catalog)}")
    return None, name, fields


def _pairs(given: str | Mapping[str, Any], noun: str) -> dict[str, Any]:
    """Return the keys and values of a text or dictionary; a leading word without `=` is the name."""
    if not isinstance(given, str):
        return dict(given)
    values: dict[str, Any] = {}
    for position, part in enumerate(given.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if position == 0 and not equals:
            key, value = "name", key
        elif not (key and equals and value):
            raise UserError(f"{part.strip()!r} in the {noun} {given!r} is not key=value: write such as layers=24,hidden=1024")
        if key in values:
            raise UserError(f"the {noun} {given!r} gives {key} twice: give it once")
        values[key] = value
    return values


def _known(catalog: Mapping[str, _Spec], values: Mapping[str, Any]) -> _Spec | None:
    """Return the entry of the catalog whose name, or whose name's last part, is given."""
    asked = str(values.get("name", "")).lower()
    if asked in catalog:
        return catalog[asked]
    found = [name for name in catalog if asked and name.endswith(f"-{asked}")]
    if len(found) > 1:
        raise UserError(f"{asked!r} may be any of {', '.join(found)}: give the whole name")
    return catalog[found[0]] if found else None


def _changed(name: str, values: Mapping[str, Any]) -> str:
    """Return a name with the changed values; the micro-batch is not part of a model's name."""
    return " ".join([name, *(f"{key}={value}" for key, value in values.items() if key != "microbatch")])


def read_count(key: str, value: Any) -> int:
    return _number(key, value, int, "a whole number, such as 24")


def read_real(key: str, value: Any) -> float:
    return _number(key, value, float, "a finite number")


def _number(key: str, value: Any, kind: Callable[[Any], _Number], example: str) -> _Number:
    try:
        number = kind(value)
        if isinstance(value, bool) or (not isinstance(value, str) and number != value) or not math.isfinite(number):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{key} is {value!r}, but it must be {example}") from None
    return number


def read_bytes(key: str, value: Any) -> int:
    return parse_bytes(value) if isinstance(value, str) and is_bytes(value) else _number(key, value, int, "a size, such as 80GiB")


def read_rate(key: str, value: Any) -> float:
    """Bytes a second from `300GB/s`, `200Gbit/s` or a bare number."""
    text = value.strip().removesuffix("/s") if isinstance(value, str) else ""
    if text.endswith("Gbit"):
        return read_real(key, text.removesuffix("Gbit")) * 1e9 / 8
    return float(parse_bytes(text)) if is_bytes(text) else _number(key, value, float, "a rate, such as 300GB/s or 200Gbit/s")


def read_flag(key: str, value: Any) -> bool:
    """True or False from `yes`, `no`, `true`, `false` or a Boolean."""
    flags = {"yes": True, "true": True, "no": False, "false": False}
    if str(value).lower() not in flags:
        raise UserError(f"{key} is {value!r}, but it must be yes or no")
    return flags[str(value).lower()]
