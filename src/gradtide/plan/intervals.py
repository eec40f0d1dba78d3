"""Stretches of time, and work that goes on slower during some of them."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]  # seconds: from, to


def stretched(
    start: float, seconds: float, busy: Iterable[Interval], factor: float
) -> float:
    """When work that begins at `start` ends, if it slows by `factor` while `busy`.

    `busy` are intervals in order of their begin that do not overlap.
    """
    if factor == 1.0 or not seconds:
        return start + seconds
    for begin, end in busy:
        if end <= start:
            continue
        if begin > start:
            if begin - start >= seconds:
                break
            seconds -= begin - start
            start = begin
        if (end - start) / factor >= seconds:
            return start + seconds * factor
        seconds -= (end - start) / factor
        start = end
    return start + seconds


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as intervals in order that do not overlap."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
