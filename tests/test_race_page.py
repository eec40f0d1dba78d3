"""What the page on the race shows is what its record says."""

from __future__ import annotations

import json
from pathlib import Path

from gradtide.lab.race.standings import Point, standings

ROOT = Path(__file__).parents[1]
RECORD = "benchmarks/records/race_gpt-small_4x50mbit_202611.json"
HEAD = """\
| scheme | steps | lowest loss | there after | times sooner | sent until then |
|---|--:|--:|--:|--:|--:|"""


def table() -> str:
    """The record as the page has it."""
    found = json.loads((ROOT / RECORD).read_text())
    courses = {}
    for row in found["results"]:
        columns = [row["course"][name] for name in Point._fields]
        courses[row["scheme"]] = [Point(*p) for p in zip(*columns, strict=True)]
    lines = [HEAD]
    leader = found.get("target", found["results"][0]["scheme"])
    for each in standings(courses, leader):
        there, sooner = each.arrival, each.sooner
        lowest = min(point.loss for point in each.points)
        cells = [f"`{each.scheme}`", f"{each.last.steps:.0f}", f"{lowest:.3f}"]
        cells.append(f"{there.seconds:.1f} s" if there else "never")
        if sooner is None:
            cells.append("never")
        else:
            few, many = sooner.lowest, sooner.highest
            cells.append(f"{sooner.median:.2f} ({few:.2f} to {many:.2f})")
        cells.append(f"{there.sent_bytes / 1e6:.0f} MB" if there else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_table_of_the_race_is_that_of_its_record() -> None:
    text, expected = (ROOT / "docs/race.md").read_text(), table()
    assert expected in text, f"docs/race.md has to have this table:\n{expected}"
    assert RECORD in text
