"""The page of an advice: what is in it, and what a browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import partial
from html import escape, unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.advise.test_advise import planned

from gradtide.advise.drawings import COLOURS, PAGE, WIDE, losses, steps
from gradtide.advise.page import chart, page, timelines
from gradtide.planner.advice import ms
from gradtide.planner.timeline import timeline
from gradtide.planning import Planning

SECTIONS = "advice", "map", "steps", "losses", "table"
RATES, DELAYS = (1e6, 1e12), (0.0, 0.1)
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
# What is looked at by the browser itself: what it has fetched, and what overlaps.
LOOK = """<script>
const box = (svg, part) => {
  const whole = svg.getBoundingClientRect(), own = part.getBoundingClientRect();
  return [own.left - whole.left, own.top - whole.top, whole.right - own.right,
    whole.bottom - own.bottom, own.width, own.height];
};
const drawings = [...document.querySelectorAll("svg")].map(svg => ({
  width: svg.getBoundingClientRect().width,
  parts: [...svg.querySelectorAll("rect, text")].map(
    part => [part.textContent, ...box(svg, part)]),
}));
document.title = JSON.stringify({
  fetched: performance.getEntriesByType("resource").map(entry => entry.name),
  wide: document.documentElement.scrollWidth, window: window.innerWidth,
  headings: [...document.querySelectorAll("h1, h2")].map(one => one.innerText),
  drawings,
});
</script>"""


@pytest.fixture(scope="module")
def made() -> tuple[Any, Any, Any, str]:
    """What was advised, the map, steps of some recipes, and the page."""
    slow, trace, network = planned(0.01, 1e8)
    again = partial(Planning(network, None, {}, 0.25).advise, trace, tune=False)
    found = chart(slow, network, again, RATES, DELAYS)
    drawn = timelines(slow, trace, network)
    return slow, found, drawn, page(slow, trace, "use <this>\n\nand that", found, drawn)


def test_it_loads_nothing_and_has_every_section(made: Any) -> None:
    _, _, _, shown = made
    assert not re.search(r"(https?:)?//|<script|<link|<img|@import|url\(", shown)
    for name in SECTIONS:
        assert f'<section id="{name}">' in shown
    assert "<h1>use &lt;this&gt;</h1>" in shown
    assert "and that" in shown
    drawings = re.findall(r"<svg.*?</svg>", shown, re.DOTALL)
    assert len(drawings) == 3
    for drawing in drawings:
        ElementTree.fromstring(drawing)


def test_the_map_says_what_pays_where(made: Any) -> None:
    _, found, _, shown = made
    step = {key: choice.step for key, choice in found.cells.items()}
    assert step[0.0, 1e12] < step[0.0, 1e6] < step[0.1, 1e6]
    assert found.cells[0.0, 1e12].name == "wfbp"  # all is hidden
    assert found.cells[0.0, 1e6].name != "wfbp"
    drawing = shown[shown.index("<svg") : shown.index("</svg>")]
    assert drawing.count("<rect") == len(step) + len(set(found.names))
    for words in ("1 Mb/s", "1000 Gb/s", "0 ms", "100 ms", *found.names):
        assert f">{escape(words)}</text>" in shown


def test_steps_are_drawn_of_the_best_and_of_what_there_is(made: Any) -> None:
    advice, _, drawn, _ = made
    assert next(iter(drawn)) == advice.recommended.name
    assert len(drawn) == 4
    assert [*drawn][-1] == "wfbp"
    shown, longest = "".join(steps(drawn)), max(one.seconds for one in drawn.values())
    for name, one in drawn.items():
        assert f">{escape(name)}: {ms(one.seconds)}</text>" in shown
    for words in ("training", "exchange", "waiting", "on the wire"):
        assert f">{words}</text>" in shown
    plain = drawn["wfbp"]
    wide = WIDE * sum(end - begin for begin, end in plain.exchange) / longest
    # What is longest as a drawing is what is longest as time.
    assert max(map(float, re.findall(r'width="([\d.]+)"', shown[60:]))) <= wide + 1e-2


def test_losses_are_ordered_and_say_what_is_compared(made: Any) -> None:
    advice, *_ = made
    shown = "".join(losses(advice))
    told = re.findall(r">([^<>]*?): ([\d.]+)x as soon as ", shown)
    factors = [float(factor) for _, factor in told]
    assert factors == sorted(factors, reverse=True)
    assert {unescape(name) for name, _ in told} | {advice.dense.name} == {
        choice.name for choice in advice.choices if not choice.refused
    }
    assert shown.count("what the others are compared with") == 1
    assert shown.count(f'fill="{COLOURS[1]}"') == 1  # what is recommended


@pytest.mark.skipif(not BROWSER, reason="needs chromium (apt-get install chromium)")
@pytest.mark.parametrize("window", [1000, 480])
def test_a_browser_shows_it_whole_and_fetches_nothing(
    made: Any, window: int, tmp_path: Path
) -> None:
    *_, shown = made
    (tmp_path / "page.html").write_text(
        shown.replace("</body>", f"{LOOK}</body>"), encoding="utf-8"
    )
    quiet = "quic", "background-networking", "component-update", "sync"
    command = [
        str(BROWSER),
        *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *(f"--disable-{what}" for what in quiet),
        f"--user-data-dir={tmp_path / 'user'}",
        f"--window-size={window},900",
        "--dump-dom",
        f"file://{tmp_path / 'page.html'}",
    ]
    seen = subprocess.run(command, capture_output=True, text=True, timeout=60)
    (title,) = re.findall(r"<title>(.*?)</title>", seen.stdout, re.DOTALL)
    found = json.loads(unescape(title))
    assert found["fetched"] == []
    assert found["headings"][0] == "use <this>"
    assert len(found["headings"]) == len(SECTIONS)
    assert found["wide"] <= max(found["window"], PAGE + 40)
    assert len(found["drawings"]) == 3
    for drawing in found["drawings"]:
        for words, *beyond, wide, high in drawing["parts"]:
            assert min(beyond) > -1, f"{words!r} is cut off"
            assert high > 0
            assert wide > 0 or not words


def test_a_timeline_is_of_the_recipe_that_was_asked_for() -> None:
    advice, trace, network = planned(0.01, 1e8)
    found = timelines(advice, trace, network)
    best = advice.recommended
    assert found[best.name] == timeline(trace, best.scheme, network)
