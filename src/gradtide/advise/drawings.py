"""What the page of an advice shows as drawings: SVG, line by line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from gradtide.advise.report import times
from gradtide.planner.advice import Advice, ms
from gradtide.planner.search import Choice
from gradtide.planner.timeline import Timeline

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c755f", "#76b7b2")
CELL, LEFT, TOP = (118, 44), 70, 8
PAGE, WIDE, BAR = 840, 660, 16  # of a drawing, of a step or bar, and how high one is
STEP = 74  # from one step to the next
# Rows of a step, and what is in them: as `Timeline` names it, in words, its colour.
ROWS = {
    "training": {
        "forward": ("forward", COLOURS[0]),
        "backward": ("loss and backward", COLOURS[2]),
        "update": ("update", COLOURS[4]),
        "waiting": ("waiting", COLOURS[3]),
    },
    "exchange": {
        "working": ("selecting, encoding, adding up", COLOURS[5]),
        "exchange": ("on the wire", COLOURS[1]),
    },
}


@dataclass(frozen=True)
class Map:
    """The recommended recipe and its step, for each delay and rate."""

    rates: Sequence[float]
    delays: Sequence[float]
    cells: Mapping[tuple[float, float], Choice]  # by delay and rate

    @property
    def names(self) -> list[str]:
        """Of all that are recommended anywhere."""
        return list(dict.fromkeys(choice.name for choice in self.cells.values()))


def crossovers(found: Map) -> Iterator[str]:
    """Rates from left to right, delays upwards, and which colour is whose."""
    names = found.names
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    (wide, high), rows = CELL, len(found.delays)
    bottom = TOP + rows * high
    yield _begin(LEFT + wide * len(found.rates), bottom + 28 + 20 * len(names))
    for (delay, rate), choice in found.cells.items():
        x = LEFT + wide * found.rates.index(rate)
        y = bottom - high * (1 + found.delays.index(delay))
        yield _rectangle(x, y, wide - 2, high - 2, colours[choice.name])
        yield _text(x + wide / 2, y + high / 2 + 4, ms(choice.step), "middle", "#fff")
    for i, rate in enumerate(found.rates):
        yield _text(LEFT + wide * (i + 0.5), bottom + 14, _rate(rate), "middle")
    for i, delay in enumerate(found.delays):
        yield _text(
            LEFT - 6, bottom - high * (i + 0.5) + 4, f"{1e3 * delay:g} ms", "end"
        )
    yield from _legend(colours.items(), bottom + 28)
    yield "</svg>"


def steps(shown: Mapping[str, Timeline]) -> Iterator[str]:
    """A step of each, by its name, at one scale."""
    longest = max(one.seconds for one in shown.values())
    keys = [key for row in ROWS.values() for key in row.values()]
    bottom = TOP + STEP * len(shown)
    yield _begin(PAGE, bottom + 34 + 20 * len(keys))
    for i, (name, one) in enumerate(shown.items()):
        y = TOP + STEP * i + 12
        yield _text(LEFT, y, f"{name}: {ms(one.seconds)}")
        for j, (row, kinds) in enumerate(ROWS.items()):
            above = y + 6 + (BAR + 3) * j
            yield _text(LEFT - 6, above + BAR - 4, row, "end")
            for kind, (_, colour) in kinds.items():
                for begin, end in getattr(one, kind):
                    x, wide = (WIDE * t / longest for t in (begin, end - begin))
                    yield _rectangle(LEFT + x, above, wide, BAR, colour)
    tick = _round(longest / 4)
    for i in range(int(longest / tick) + 1):
        x = LEFT + WIDE * i * tick / longest
        yield _rectangle(x, bottom, 1, 5, "#222")
        yield _text(x, bottom + 18, ms(i * tick) if i else "0", "middle")
    yield from _legend(keys, bottom + 34)
    yield "</svg>"


def losses(advice: Advice) -> Iterator[str]:
    """How long each takes to the same loss, the soonest first.

    A bar is as long as what is typical; a line goes from the least to the most that is
    known.
    """
    usable = [choice for choice in advice.choices if not choice.refused]
    sooner = {choice.name: advice.sooner(choice) for choice in usable}
    order = sorted(sooner, key=lambda name: -sooner[name][0])
    longest = max(1 / typical for typical, _, _ in sooner.values())
    yield _begin(PAGE, TOP + 42 * len(order))
    for i, name in enumerate(order):
        y, (typical, worst, best) = TOP + 42 * i, sooner[name]
        told = f"{times(typical)} as soon as {advice.dense.name}"
        if name == advice.dense.name:
            told = "what the others are compared with"
        elif worst < best:
            told += f" ({times(worst)} to {times(best)})"
        colour = COLOURS[1 if name == advice.recommended.name else 0]
        yield _text(LEFT, y + 12, f"{name}: {told}")
        yield _rectangle(LEFT, y + 17, WIDE / typical / longest, BAR - 2, colour)
        begin, end = (min(WIDE / x / longest, WIDE) for x in (best, worst))
        if begin < end:
            yield _rectangle(LEFT + begin, y + 23, end - begin, 2, "#222")
    yield "</svg>"


def _legend(colours: Iterable[tuple[str, str]], y: float) -> Iterator[str]:
    for i, (name, colour) in enumerate(colours):
        yield _rectangle(LEFT, y + 20 * i, 14, 14, colour)
        yield _text(LEFT + 22, y + 20 * i + 12, name)


def _begin(wide: float, high: float) -> str:
    return f'<svg width="{wide:g}" height="{high:g}" role="img">'


def _rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    size = f'width="{width:.4g}" height="{height:g}"'
    return f'<rect x="{x:.5g}" y="{y:g}" {size} fill="{colour}"/>'


def _text(
    x: float, y: float, words: str, anchor: str = "start", colour: str = "#222"
) -> str:
    how = f'text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:.5g}" y="{y:g}" {how}>{escape(words)}</text>'


def _rate(rate: float) -> str:
    return f"{rate / 1e9:g} Gb/s" if rate >= 1e9 else f"{rate / 1e6:g} Mb/s"


def _round(seconds: float) -> float:
    """1, 2 or 5 times a power of ten, not below this."""
    power = 10.0 ** math.floor(math.log10(seconds))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= seconds)
