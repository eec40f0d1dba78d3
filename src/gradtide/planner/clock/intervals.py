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
        before = max(begin - start, 0.0)
        if before >= seconds:
            break
        seconds, start = seconds - before, max(begin, start)
        if (end - start) / factor >= seconds:
            return start + seconds * factor
        seconds, start = seconds - (end - start) / factor, end
    return start + seconds


def held_up(
    start: float,
    seconds: float,
    busy: Iterable[Interval],
    factor: float,
    taken: Iterable[Interval],
    more: float,
) -> float:
    """As `stretched`, but where work is `taken` it slows by `more` instead.

    `busy` and `taken` are unions.
    """
    if more <= factor:
        return stretched(start, seconds, busy, factor)
    pieces = [(begin, end, more) for begin, end in taken]
    pieces += [(*piece, factor) for piece in without(busy, taken)]
    for begin, end, slower in sorted(pieces):
        ends = stretched(start, seconds, [(begin, end)], slower)
        if ends <= end:
            return ends
        if end > start:
            before = max(begin - start, 0.0)
            seconds -= before + (end - max(start, begin)) / slower
            start = end
    return start + seconds


def without(busy: Iterable[Interval], taken: Iterable[Interval]) -> list[Interval]:
    """What is left of `busy`; both are unions."""
    left, others = list[Interval](), list(taken)
    for begin, end in busy:
        for first, last in others:
            if last > begin and first < end:
                if first > begin:
                    left.append((begin, first))
                begin = min(last, end)
        if begin < end:
            left.append((begin, end))
    return left


def gap(busy: Iterable[Interval], start: float, seconds: float) -> float:
    """From when on so many seconds are free; `busy` is a union."""
    for begin, end in busy:
        if end > start:
            if begin - start >= seconds:
                break
            start = end
    return start


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as intervals in order that do not overlap."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
