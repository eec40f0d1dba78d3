"""What simulations say in docs/benchmarks.md is what the code says now: the quick part.

`make claims` makes whole records again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.programs import BENCHMARKS, imported

ELSEWHERE = {  # records whose quick part another test runs
    "published_202611.json": "planner/test_published.py",
    "papers_202611.json": "test_papers.py",
}
RUN = (
    "published_curvature_202611.json",
    "crossovers_202611.json",
    "simulate_4096_202611.json",
    "fusion_202611.json",
)


@pytest.fixture(scope="module")
def program() -> Iterator[Any]:
    with imported(
        "claims",
        "as_published",
        "crossovers",
        "fusion",
        "published_curvature",
        "papers_page",
    ) as found:
        yield found


@pytest.fixture(scope="module")
def text(program: Any) -> str:
    found: str = program.PAGE.read_text()
    return found


def claim_of(program: Any, record: str) -> Any:
    (found,) = (claim for claim in program.CLAIMS if claim.record == record)
    return found


@pytest.mark.product(each=6)
@pytest.mark.parametrize("record", RUN)
def test_a_claim_holds_now(program: Any, record: str) -> None:
    claim = claim_of(program, record)
    wrong = program.wrong_now(claim)
    remedy = f"python {claim.command} --out benchmarks/records/{claim.record}"
    assert not wrong, (
        f"docs/benchmarks.md, the row {claim.row!r}: {claim.record} says something "
        f"else than the code now. Make it again ({remedy}) and correct the row: {wrong}"
    )


@pytest.mark.parametrize("record", [*RUN, *ELSEWHERE])
def test_a_row_has_the_figures_of_its_record(
    program: Any, text: str, record: str
) -> None:
    claim = claim_of(program, record)
    assert not program.unsaid(claim, text), program.row_of(claim, text)
    assert record in program.row_of(claim, text)


def test_every_claim_is_run_by_a_test(program: Any) -> None:
    assert {*RUN, *ELSEWHERE} == {claim.record for claim in program.CLAIMS}
    quick = {claim.record for claim in program.CLAIMS if claim.part is not None}
    assert quick == {*RUN}
    for test in ELSEWHERE.values():
        assert (Path(__file__).parent / test).exists()


def test_every_record_of_the_page_is_there_and_known(program: Any, text: str) -> None:
    names = program.linked(text)
    assert len(names) > 50
    for name in names:
        assert (program.RECORDS / name).exists()
        for path in program.measured(name):
            assert (BENCHMARKS.parent / path).exists()


@pytest.mark.parametrize(
    ("now", "then", "where"),
    [
        ({"a": 1.0}, {"a": 1.1}, "/a"),
        ({"a": [1, 2]}, {"a": [1]}, "/a"),
        ({"a": [{"b": "x"}]}, {"a": [{"b": "y"}]}, "/a/0/b"),
        ({"a": 1, "b": 2}, {"a": 1}, "/b"),
        ({"a": None}, {"a": 1}, "/a"),
    ],
)
def test_differences_are_found_and_placed(
    program: Any, now: Any, then: Any, where: str
) -> None:
    (told,) = program.differences(now, then, 1e-6)
    assert told.startswith(f"{where}:")
    assert not [*program.differences(then, then, 0.0)]


def test_what_passes_is_not_compared(program: Any) -> None:
    then = {"commit": "a", "took": 1.0, "seconds": 1.0, "step": 2.0}
    now = {"commit": "b", "took": 3.0, "seconds": 5.0, "step": 2.0 * (1 + 1e-9)}
    assert [*program.differences(now, then, 1e-6)] == ["/seconds: 5 now, 1 then"]
    assert not [*program.differences(now, then, 1e-6, frozenset({"seconds"}))]


def test_a_changed_figure_is_told_with_its_row(program: Any, text: str) -> None:
    claim = claim_of(program, "crossovers_202611.json")
    wrong = replace(claim, said=lambda record: ["77.7 %"])
    assert program.unsaid(wrong, text) == ["77.7 %"]
    with pytest.raises(ValueError, match="0 rows begin with 'no such row'"):
        program.row_of(replace(claim, row="no such row"), text)
