"""The advice as a page: one file, which loads nothing from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

from gradtide.advise.drawings import Map, crossovers, losses, steps
from gradtide.advise.report import PLAIN
from gradtide.planner.advice import Advice
from gradtide.planner.network import Network
from gradtide.planner.timeline import Timeline, timeline
from gradtide.planner.trace import StepTrace
from gradtide.scheme import Scheme

RATES = (1e7, 1e8, 1e9, 1e10, 1e11)  # bits/s
DELAYS = (0.0, 0.01, 0.1)  # seconds of a round trip
LOSSY = 3  # of the map, besides the dense ones
STEPS = 3  # that are drawn, and wfbp's

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


def timelines(
    advice: Advice, trace: StepTrace, network: Network
) -> dict[str, Timeline]:
    """A step of what is recommended, of the next few, and of `wfbp`."""
    usable = [choice for choice in advice.choices if not choice.refused]
    shown = [advice.recommended, *usable]
    few = [*dict.fromkeys(choice.name for choice in shown)][:STEPS]
    names = dict.fromkeys([*few, PLAIN])
    schemes = {choice.name: choice.scheme for choice in usable}
    return {name: timeline(trace, schemes[name], network) for name in names}


def page(
    advice: Advice,
    trace: StepTrace,
    answer: str,
    crossover: Map,
    drawn: Mapping[str, Timeline],
) -> str:
    """HTML; `answer` is what was said in words, `drawn` are steps of some recipes."""
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
            *crossovers(crossover),
            "</section>",
            '<section id="steps"><h2>What a step does</h2>',
            "<p>The training thread above, and below what exchanges beside it. In "
            "rounds it is the step that ends one, which most steps are shorter than."
            "</p>",
            *steps(drawn),
            "</section>",
            '<section id="losses"><h2>Time to the same loss</h2>',
            "<p>What a step takes, times how many are needed: a bar is what is typical "
            "of the recipe, the line the least and the most that is known. Your model "
            "may be another.</p>",
            *losses(advice),
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
