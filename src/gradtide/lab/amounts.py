"""Times and shares as people write them: "40ms", "0.2s"; "0.5%", "0.005"."""

from __future__ import annotations

import re

_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d+)?)"
_TIME = re.compile(rf"{_NUMBER}\s*(us|ms|s)", re.IGNORECASE | re.ASCII)
_SHARE = re.compile(rf"{_NUMBER}\s*(%?)", re.ASCII)


def parse_time(name: str, text: str) -> float:
    """Seconds. Raises ValueError, which begins with `name`."""
    match = _TIME.fullmatch(text.strip())
    if not match:
        raise ValueError(
            f"{name} {text!r} is no time: write a number and a unit (us, ms or s), "
            'such as "40ms" or "0.2s"'
        )
    return float(match[1]) * _TIMES[match[2].lower()]


def parse_share(name: str, text: str) -> float:
    """A share of one. Raises ValueError, which begins with `name`."""
    match = _SHARE.fullmatch(text.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else 2.0
    if not 0 <= share <= 1:
        raise ValueError(
            f'{name} {text!r} is no share: write a percentage, such as "0.5%", or a '
            'part of one, such as "0.005"'
        )
    return share


def format_time(seconds: float) -> str:
    """The shortest text that `parse_time` reads back, to six significant digits."""
    return f"{seconds:.6g}s" if seconds >= 1 else f"{seconds * 1e3:.6g}ms"


def format_share(share: float) -> str:
    """The shortest text that `parse_share` reads back, to six significant digits."""
    return f"{share * 100:.6g}%"
