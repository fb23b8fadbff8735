"""Text forms of bytes, shares, times and durations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle.core.errors import UserError
from recycle.core.units import (
    format_bytes,
    format_duration,
    format_us,
    is_bytes,
    parse_bytes,
    parse_duration_us,
    parse_share_or_count,
)


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


@pytest.mark.parametrize(
    ("text", "time_us"),
    [
        ("250ms", 250_000),
        ("45s", 45_000_000),
        ("30m", 1_800_000_000),
        ("30 min", 1_800_000_000),
        ("1.5h", 5_400_000_000),
        ("6h", 21_600_000_000),
        (" 2d ", 172_800_000_000),
        ("0.1d", 8_640_000_000),
        ("0s", 0),
        ("36500d", 3_153_600_000_000_000),
    ],
)
def test_a_duration_is_a_number_and_a_unit(text, time_us):
    assert parse_duration_us(text) == time_us


@pytest.mark.parametrize(
    "text", ["", "30", "m", "-5m", "nanh", "infd", "1e3s", "30M", "30 hours", "5m30s", "1.h", ".5h", "9" * 5000 + "s", "٣h"]
)
def test_a_text_that_is_no_duration_is_refused(text):
    with pytest.raises(UserError, match="is not a duration: write a number and one of ms, s, m, h, d, such as 45s"):
        parse_duration_us(text)


@pytest.mark.parametrize("text", ["36501d", "99999999999999999999d", "1000000h"])
def test_an_absurd_duration_is_refused(text):
    with pytest.raises(UserError, match="is longer than 100 years: that cannot be meant"):
        parse_duration_us(text)


@pytest.mark.parametrize(
    ("time_us", "text"),
    [
        (0, "0 s"),
        (7, "7 µs"),
        (250_000, "250 ms"),
        (999_900, "1 s"),
        (1_500_000, "1.5 s"),
        (45_000_000, "45 s"),
        (59_990_000, "1 min"),
        (90_000_000, "1 min 30 s"),
        (3_599_600_000, "1 h"),
        (5_400_000_000, "1 h 30 min"),
        (21_600_000_000, "6 h"),
        (172_790_000_000, "2 d"),
        (1_080_000_000_000, "12.5 d"),
        (31_536_000_000_000, "365 d"),
        (315_360_000_000_000, "3,650 d"),
    ],
)
def test_a_long_time_reads_as_a_person_would_say_it(time_us, text):
    assert format_duration(time_us) == text


@given(st.integers(1, 10**15))
def test_a_duration_loses_little_when_it_is_said(time_us):
    said_us = sum(parse_duration_us(part) for part in _parts(format_duration(time_us)))
    assert abs(said_us - time_us) <= 0.03 * time_us


def _parts(text: str) -> list[str]:
    """`1 h 30 min` as `1 h` and `30 min`; what is below a millisecond as a decimal of one."""
    words = text.replace(",", "").split()
    pairs = zip(words[::2], words[1::2], strict=True)
    return [f"{int(number) / 1000:.3f} ms" if unit == "µs" else f"{number} {unit}" for number, unit in pairs]
