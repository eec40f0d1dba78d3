"""Rates of links as people write them: "100mbit", "2.5gbit", "none".

Units are decimal, as network rates and `tc` have them: 1 gbit is 1e9 bits per second.
"""

from __future__ import annotations

import math
import re

_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SYNTAX = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?bit)", re.IGNORECASE | re.ASCII)


def parse_rate(text: str) -> float | None:
    """Bits per second, or None for "none": a link that nothing slows down."""
    if text.strip().lower() == "none":
        return None
    match = _SYNTAX.fullmatch(text.strip())
    bits = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    if not 1 <= bits < math.inf:
        raise ValueError(
            f"{text!r} is not a rate: write a number and a unit (kbit, mbit or gbit),"
            ' such as "100mbit" or "2.5gbit", or "none" for a link without a limit'
        )
    return bits


def limited(text: str, refusal: str) -> float:
    """As `parse_rate`, where a link has to have a limit: `refusal` of "none"."""
    bits = parse_rate(text)
    if bits is None:
        raise ValueError(refusal)
    return bits


def format_rate(bits: float | None) -> str:
    """The shortest text that `parse_rate` reads back, to six significant digits."""
    if bits is None:
        return "none"
    unit = max((u for u in _UNITS if bits >= _UNITS[u]), key=lambda u: _UNITS[u])
    return f"{bits / _UNITS[unit]:.6g}{unit}"
