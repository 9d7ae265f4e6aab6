import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchecho.errors import OptionError
from torchecho.units import format_bytes, format_overhead, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("900 MB", 900_000_000),
        ("900MiB", 943_718_400),
        ("8GiB", 8_589_934_592),
        ("8gib", 8_589_934_592),
        ("8 GB", 8_000_000_000),
        ("1.5GiB", 1_610_612_736),
        (".5KiB", 512),
        ("2.KiB", 2048),
        ("1TiB", 1_099_511_627_776),
        ("1TB", 1_000_000_000_000),
        ("  2 GiB  ", 2_147_483_648),
    ],
)
def test_parses_bytes(text, expected_bytes):
    assert parse_bytes(text) == expected_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1e9", "8 GiB extra", "8Gi", "8 parsecs", "nan", "1,5GiB", "1.2.3", "٣"]
)
def test_refuses_what_is_not_bytes(text):
    with pytest.raises(OptionError, match=r"cannot read .* as bytes") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)
    assert "GiB" in str(caught.value)


@given(st.integers(min_value=0, max_value=2**50), st.sampled_from(["B", "KiB", "MiB", "GiB"]))
def test_parses_whole_counts_exactly(count, unit):
    scale = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}[unit]
    assert parse_bytes(f"{count}{unit}") == count * scale


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 * 1024**2, "5.0 MiB"),
        (8_589_934_592, "8.0 GiB"),
        (3 * 1024**4, "3.0 TiB"),
        (4096 * 1024**4, "4096.0 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_formats_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 us"), (2.5e-6, "2.5 us"), (0.0123, "12.3 ms"), (1.0, "1.00 s"), (75.5, "75.50 s"), (-0.002, "-2.0 ms")],
)
def test_formats_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("fraction", "text"), [(0.0, "+0.0 %"), (0.1, "+10.0 %"), (-0.025, "-2.5 %"), (1.5, "+150.0 %")]
)
def test_formats_overhead(fraction, text):
    assert format_overhead(fraction) == text
