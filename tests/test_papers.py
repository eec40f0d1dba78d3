"""docs/papers.md is what its record says, and the record what the code prints now."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.programs import imported

QUICK = ("oktopk", "dear_resnet50", "selection", "build_up", "rounds", "lab")


@pytest.fixture(scope="module")
def program() -> Iterator[Any]:
    with imported(
        "papers",
        "papers_clusters",
        "papers_page",
        "published_curvature",
        "crossovers",
        "as_published",
    ) as found:
        yield found


def test_the_page_is_that_of_its_record(program: Any) -> None:
    found = json.loads(program.RECORD.read_text())["values"]
    assert set(found) == set(program.SECTIONS)
    expected = program.papers_page.page(found)
    assert program.PAGE.read_text() == expected, "make the page: make papers"


@pytest.mark.product
@pytest.mark.timeout(400)  # of 256 ranks, where many others run
@pytest.mark.parametrize("section", QUICK)
def test_the_record_is_what_the_code_prints_now(program: Any, section: str) -> None:
    then = json.loads(program.RECORD.read_text())["values"][section]
    found = program.values((section,))[section]
    assert found == pytest.approx(then, rel=1e-6), "docs/papers.md: make papers"


def test_the_page_says_what_was_missed(program: Any) -> None:
    page = program.papers_page
    then = json.loads(program.RECORD.read_text())["values"]
    missed = {
        (claim.states, claim.paper)
        for claim in page.CLAIMS
        if not claim.bound and abs(page.off(claim, then)) > 0.15
    }
    rows = [line for line in program.PAGE.read_text().splitlines() if line[:1] == "|"]
    marked = [row for row in rows if row.endswith("|") and "**missed**" in row]
    assert len(marked) == len(missed)
    for states, _ in missed:
        assert any(states in row for row in marked)


def test_a_bound_that_is_broken_is_missed(program: Any) -> None:
    page = program.papers_page
    then = json.loads(program.RECORD.read_text())["values"]
    then["oktopk"]["words"] = 6.1
    rows = page.page(then).splitlines()
    assert any("of k (P - 1) / P: below" in row and "**missed**" in row for row in rows)
