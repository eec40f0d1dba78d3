from __future__ import annotations

import pytest

from gradtide.lab.rate import format_rate, parse_rate


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("100mbit", 1e8),
        ("1gbit", 1e9),
        ("2.5gbit", 2.5e9),
        ("512kbit", 512e3),
        ("64bit", 64.0),
        (" 10 MBit ", 1e7),
        ("none", None),
    ],
)
def test_a_rate_is_read(text: str, bits: float | None) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize(
    "text",
    [
        *("", "fast", "100", "100mb", "-1mbit", "0mbit", "1e3mbit", "1.mbit", "nan"),
        *("\uff11\uff10mbit", "1\u212abit"),  # full-width digits, and a Kelvin sign
    ],
)
def test_what_is_no_rate_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(ValueError, match="100mbit"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["100mbit", "1gbit", "2.5gbit", "1bit", "none"])
def test_what_is_shown_can_be_read_back(text: str) -> None:
    assert format_rate(parse_rate(text)) == text
