"""What the docs say of published iteration times is what the present code prints."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks/records/published_202611.json"
OTHERS = ROOT / "benchmarks/records/published_more_202611.json"


def test_published_times_are_predicted_as_the_record_and_the_docs_say() -> None:
    program = runpy.run_path(str(ROOT / "benchmarks/published.py"))
    rows, record = program["rows"](program["TIMES"]), json.loads(RECORD.read_text())
    then = [row["simulated"] for row in record["rows"]]
    assert [row.simulated for row in rows] == pytest.approx(then, rel=1e-6)
    worst = [
        max(abs(row.error) for row in rows if row.method == method)
        for method in program["SCHEMES"]
    ]
    said = ", ".join(f"{100 * error:.1f}" for error in worst) + " %"
    assert said == "4.6, 8.4, 6.4 %"
    assert len(program["disordered"](rows)) == record["disordered"] == 0
    for page in ("docs/benchmarks.md", "docs/simulate.md", "benchmarks/README.md"):
        text = (ROOT / page).read_text()
        assert all(f"{100 * error:.1f}" in text for error in worst), page


@pytest.mark.slow
def test_more_rows_are_predicted_as_the_record_and_the_docs_say() -> None:
    program = runpy.run_path(str(ROOT / "benchmarks/published.py"))
    rows, record = program["rows"](program["MORE"]), json.loads(OTHERS.read_text())
    then = [row["simulated"] for row in record["rows"]]
    assert [row.simulated for row in rows] == pytest.approx(then, rel=1e-6)
    within, middle = program["general"](rows)
    assert within == record["within"] >= program["SHARE"]
    assert middle == pytest.approx(record["median"])
    assert middle <= program["MIDDLE"]
    near = round(within * len(rows))
    for page in ("docs/benchmarks.md", "docs/simulate.md", "benchmarks/README.md"):
        text = (ROOT / page).read_text()
        assert f"{near} of {len(rows)}" in text, page
        assert f"{100 * middle:.1f} %" in text, page
