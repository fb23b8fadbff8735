"""Quantities as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle.core.errors import UserError
from recycle.core.units import format_bytes, format_us, is_bytes, parse_bytes, parse_share_or_count


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 1024**3),
        ("512 MiB", 512 * 1024**2),
        ("1.5KiB", 1536),
        ("7B", 7),
        ("80GB", 80_000_000_000),
        (" 2TB ", 2_000_000_000_000),
        ("2.01kB", 2010),
        ("8.19kB", 8190),
    ],
)
def test_a_size_is_a_number_and_a_unit(text, size):
    assert is_bytes(text)
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "80", "80 gib", "GiB", "-1GiB", "80GiB!", "1e3GiB", "80G", "9" * 400 + "GiB"])
def test_a_text_that_is_no_size_is_refused(text):
    with pytest.raises(UserError, match="is not a size"):
        parse_bytes(text)


@given(st.integers(0, 10**6), st.sampled_from(["B", "KiB", "MiB", "GiB", "kB", "MB", "GB"]))
def test_whole_sizes_are_exact(number, unit):
    one = parse_bytes(f"1{unit}")
    assert parse_bytes(f"{number}{unit}") == number * one


def test_sizes_read_in_the_largest_unit_that_fits():
    assert format_bytes(0) == "0 B"
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(1024) == "1.0 KiB"
    assert format_bytes(80 * 1024**3) == "80.0 GiB"
    assert format_bytes(3 * 1024**4) == "3.0 TiB"


def test_times_read_in_the_unit_that_fits():
    assert format_us(27) == "27 µs"
    assert format_us(9_999) == "9999 µs"
    assert format_us(10_000) == "10.00 ms"
    assert format_us(1_204_000) == "1.204 s"


@pytest.mark.parametrize(
    ("text", "count"), [("12", 12), ("25%", 8), ("10%", 3), ("0%", 0), ("0", 0), ("100%", 32), (" 12.5% ", 4)]
)
def test_failures_are_a_count_or_a_share_rounded_down(text, count):
    assert parse_share_or_count(text, whole=32) == count


def test_a_share_that_is_whole_is_not_lost_to_rounding():
    assert [parse_share_or_count(f"{share}%", 100) for share in range(101)] == list(range(101))


@pytest.mark.parametrize("text", ["", "%", "many", "-1", "-5%", "1.5", "nan%", "inf%", "1e999%", "9" * 400])
def test_a_text_that_is_neither_count_nor_share_is_refused(text):
    with pytest.raises(UserError, match="is neither a count nor a share"):
        parse_share_or_count(text, whole=32)
