from __future__ import annotations

import pytest

from gradtide.lab.amounts import format_share, format_time, parse_share, parse_time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("40ms", 0.04), ("0.2s", 0.2), (" 500 US ", 5e-4), ("0ms", 0.0)],
)
def test_a_time_is_read(text: str, seconds: float) -> None:
    assert parse_time("--delay", text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        *("", "40", "fast", "-1ms", "1e3ms", "nans", "4m"),
        *("\uff14ms", "4\u017f"),  # a full-width digit, and a long s
    ],
)
def test_what_is_no_time_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--delay .* such as \"40ms\""):
        parse_time("--delay", text)


@pytest.mark.parametrize(
    ("text", "share"), [("0.5%", 0.005), ("0.005", 0.005), ("0", 0.0), ("100 %", 1.0)]
)
def test_a_share_is_read(text: str, share: float) -> None:
    assert parse_share("--loss", text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "some", "-1%", "5", "101%", "1e-3", "\uff11%"])
def test_what_is_no_share_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--loss .* such as \"0.5%\""):
        parse_share("--loss", text)


def test_what_is_shown_can_be_read_back() -> None:
    assert [format_time(seconds) for seconds in (0.04, 5e-5, 2.5)] == [
        *("40ms", "0.05ms", "2.5s")
    ]
    assert format_share(0.005) == "0.5%"
    assert parse_time("", format_time(0.123456)) == pytest.approx(0.123456)
    assert parse_share("", format_share(0.0123)) == pytest.approx(0.0123)
