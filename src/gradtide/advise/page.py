"""The advice as a page: one file, which loads nothing from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from gradtide.planner.advice import Advice, ms
from gradtide.planner.network import Network
from gradtide.planner.search import Choice
from gradtide.planner.trace import StepTrace
from gradtide.scheme import Scheme

RATES = (1e7, 1e8, 1e9, 1e10, 1e11)  # bits/s
DELAYS = (0.0, 0.01, 0.1)  # seconds of a round trip
LOSSY = 3  # of the map, besides the dense ones
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c755f", "#76b7b2")
CELL, LEFT, TOP = (118, 44), 70, 8

STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto;
  padding: 0 1em; color: #222 }
h1 { font-size: 1.3em } h2 { font-size: 1.1em; margin-top: 2em }
pre { background: #f4f4f4; padding: .7em; white-space: pre-wrap }
table { border-collapse: collapse; font-size: .92em }
td, th { padding: .25em .7em; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child, td:last-child, th:last-child { text-align: left }
.best { font-weight: bold } svg text { font: 12px system-ui, sans-serif }
"""


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


def chart(
    advice: Advice,
    network: Network,
    again: Callable[[Network, Mapping[str, Scheme]], Advice],
    rates: Sequence[float] = RATES,
    delays: Sequence[float] = DELAYS,
) -> Map:
    """What would be recommended if the links of `network` were others.

    `again` advises anew: of the dense schemes, what is recommended here, and the
    fastest few of the others.
    """
    lossy = [c for c in advice.choices if not c.refused and c.kind == "lossy"]
    asked = {choice.name: choice.scheme for choice in lossy[:LOSSY]}
    if advice.recommended.kind == "lossy":
        asked[advice.recommended.name] = advice.recommended.scheme
    cells = {
        (delay, rate): again(there, asked).recommended
        for rate in rates
        for delay in delays
        for there in [network.scaled(hosts=network.hosts, rate=rate).delayed(delay)]
    }
    return Map(rates, delays, cells)


def page(advice: Advice, trace: StepTrace, answer: str, crossover: Map) -> str:
    """HTML; `answer` is what was said in words."""
    head, _, rest = answer.partition("\n")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f"<title>{escape(trace.name)}: which recipe</title>",
            f"<style>{STYLE}</style></head><body>",
            f'<section id="advice"><h1>{escape(head)}</h1>',
            f"<pre>{escape(rest.strip())}</pre></section>",
            '<section id="map"><h2>If the links were others</h2>',
            "<p>Recommended by the rate of each host's link, and by how much longer "
            "round trips between hosts take. A cell says how long a step is.</p>",
            *_svg(crossover),
            "</section>",
            '<section id="table"><h2>All recipes, here</h2>',
            *_table(advice),
            "</section></body></html>",
            "",
        ]
    )


def _table(advice: Advice) -> Iterator[str]:
    headings = "recipe", "step ms", "exposed ms", "MB sent", "why"
    yield "<table><tr>" + "".join(f"<th>{each}</th>" for each in headings) + "</tr>"
    for choice in advice.choices:
        told = choice.prediction
        numbers = [f"{1e3 * t:.4g}" for t in (told.step, told.exposed)]
        cells = [choice.name, *numbers, f"{told.sent_bytes / 1e6:.3g}"]
        cells.append("; ".join(advice.reasons(choice)))
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        best = ' class="best"' if choice is advice.recommended else ""
        yield f"<tr{best}>{row}</tr>"
    yield "</table>"


def _svg(found: Map) -> Iterator[str]:
    """Rates from left to right, delays upwards, and which colour is whose."""
    names = found.names
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    (wide, high), rows = CELL, len(found.delays)
    bottom = TOP + rows * high
    width, height = LEFT + wide * len(found.rates), bottom + 28 + 20 * len(names)
    yield f'<svg width="{width}" height="{height}" role="img">'
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
    for i, name in enumerate(names):
        y = bottom + 28 + 20 * i
        yield _rectangle(LEFT, y, 14, 14, colours[name])
        yield _text(LEFT + 22, y + 12, name)
    yield "</svg>"


def _rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    size = f'width="{width:g}" height="{height:g}"'
    return f'<rect x="{x:g}" y="{y:g}" {size} fill="{colour}"/>'


def _text(
    x: float, y: float, words: str, anchor: str = "start", colour: str = "#222"
) -> str:
    how = f'text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:g}" y="{y:g}" {how}>{escape(words)}</text>'


def _rate(rate: float) -> str:
    return f"{rate / 1e9:g} Gb/s" if rate >= 1e9 else f"{rate / 1e6:g} Mb/s"
