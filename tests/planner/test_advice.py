"""Which scheme is recommended, and what is said of it, for predictions made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from gradtide.planner.advice import Advice, advise
from gradtide.planner.search import Choice, in_order
from gradtide.planner.virtual import Prediction
from gradtide.scheme import parse
from gradtide.scheme.recommended import RECOMMENDED, Steps

MARGIN = 0.25
COMPUTE = 0.100  # seconds of forward, backward and update


def choice(
    name: str, exposed: float, *, more: float = 0.0, refused: str = ""
) -> Choice:
    """A scheme whose step is COMPUTE, `more` seconds of selection, and `exposed`."""
    told = Prediction(
        step=COMPUTE + more + exposed,
        forward=0.03,
        backward=0.06,
        select=more,
        exchange=exposed + 0.05,
        apply=0.01,
        exposed=exposed,
        sent_bytes=1e6,
        limit=0.09 + exposed,
        buckets=4,
    )
    return Choice(name, parse(name), told, refused)


def advice(*choices: Choice, size: int = 8, margin: float = MARGIN) -> Advice:
    return advise(in_order(choices), size, margin)


def dense(wfbp: float, dear: float, half: float, dear_half: float) -> list[Choice]:
    """The four dense schemes, by what they expose."""
    exposed = {
        "wfbp": wfbp,
        "dear": dear,
        "wfbp(wire='bf16')": half,
        "dear(wire='bf16')": dear_half,
    }
    return [choice(name, seconds) for name, seconds in exposed.items()]


def names(found: Advice) -> set[str]:
    return {rule.name for rule in found.rules}


def test_it_says_where_ranks_wait_for_processors() -> None:
    bound = choice("topk", 0.05)
    told = replace(bound.prediction, limit=0.08, crowded=0.03)
    bound = replace(bound, prediction=told)
    found = advice(*dense(0.3, 0.3, 0.2, 0.2), bound)
    words = "; ".join(found.reasons(bound))
    assert "30 ms of waiting for processors that ranks share" in words


def test_where_overlap_hides_the_exchange_nothing_is_compressed() -> None:
    found = advice(*dense(0.004, 0.004, 0.002, 0.002), choice("topk", 0.0), margin=0.0)
    assert found.recommended.name == "wfbp"
    assert "overlap suffices" in names(found)
    rule = found.rules[0]
    assert rule.numbers["exposed_seconds"] == pytest.approx(0.004)
    assert rule.numbers["most_gain"] == pytest.approx(0.04)
    assert "Don't compress" in found.verdict
    assert "waits 4 ms, 3.8 % of the step, with 50 ms of exchange hidden" in (
        found.verdict
    )
    assert "4 %" in found.verdict


def test_where_bf16_hides_it_nothing_sparser_is_used() -> None:
    found = advice(*dense(0.05, 0.04, 0.003, 0.003), choice("topk", 0.0), margin=0.0)
    assert found.recommended.name == "wfbp(wire='bf16')"
    assert "bf16 suffices" in names(found)
    assert "exact" in found.verdict


def test_a_lossy_scheme_needs_a_margin() -> None:
    rows = dense(0.2, 0.2, 0.1, 0.1)
    little, much = choice("topk", 0.07), choice("oktopk", 0.01)
    found = advice(*rows, little)
    assert found.dense.name == found.recommended.name == "wfbp(wire='bf16')"
    assert found.fastest is little
    assert "no margin" in names(found)
    assert found.break_even(little) == pytest.approx(0.2 / 0.17 - 1)
    found = advice(*rows, little, much)
    assert found.recommended is much
    assert "82 % more steps" in found.verdict
    assert "no margin" not in names(found)
    assert advice(*rows, little, margin=0.1).recommended is little


def test_of_equals_the_plainest_is_used() -> None:
    assert advice(*dense(0.1, 0.099, 0.1, 0.099)).recommended.name == "wfbp"
    assert advice(*dense(0.1, 0.09, 0.09, 0.09)).recommended.name == "dear"


def test_what_is_refused_is_never_used() -> None:
    row = choice("gtopk", 0.0, refused="of no use here")
    found = advice(*dense(0.3, 0.3, 0.3, 0.3), row)
    assert found.recommended.name == found.fastest.name == "wfbp"
    assert found.reasons(row) == ["of no use here"]
    assert found.choices[-1] is row


def test_two_ranks_are_a_rule_but_no_verdict() -> None:
    found = advice(*dense(0.3, 0.3, 0.15, 0.15), choice("topk", 0.0), size=2)
    assert "two ranks" in names(found)
    assert found.recommended.name == "topk"


def test_reasons_follow_from_the_prediction() -> None:
    rows = dense(0.3, 0.002, 0.3, 0.3)
    slow, fast = choice("topk", 0.1, more=0.15), choice("oktopk", 0.001, more=0.05)
    found = advice(*rows, slow, fast, choice("cltk", 0.2))
    told = {row.name: "; ".join(found.reasons(row)) for row in found.choices}
    assert "waits 300 ms, 75 % of the step" in told["wfbp"]
    assert "2.6 % above its limit: only fewer bytes help" in told["wfbp"]
    assert "waits 2 ms, 2 % of the step, with 50 ms of exchange" in told["dear"]
    assert "limit" not in told["dear"]
    assert "of selecting" in told["topk"]
    assert "exposes no less than dear" in told["topk"]
    assert "longer than dear's" in told["topk"]


def test_selection_that_costs_more_than_it_saves_is_named() -> None:
    row = choice("topk", 0.02, more=0.10)
    found = advice(*dense(0.1, 0.1, 0.1, 0.1), row)
    assert "take 100 ms to save 80 ms" in "; ".join(found.reasons(row))


def test_what_ranks_wait_for_is_never_more_than_there_is() -> None:
    """Where they wait for processors, that was called hidden exchange."""
    row = choice("dear", 0.004)
    row = replace(row, prediction=replace(row.prediction, exchange=0.001))
    found = advice(*dense(0.3, 0.3, 0.3, 0.3)[2:], choice("wfbp", 0.3), row)
    (words,) = found.reasons(row)
    assert words == "waits 4 ms, 3.8 % of the step"
    assert "hidden" not in found.verdict


# - The ladder -------------------------------------------------------------------------

LADDER = {row.recipe: row for row in RECOMMENDED}
FIRST, SECOND, SGD = (
    "topka2a(0.02, schedule='local', warmup=60, wire='e3m0')",
    "exdyna(0.01, schedule='local', warmup=240, wire='e3m0')",
    "exdyna(0.01, warmup=160)",
)


@pytest.mark.parametrize(
    ("second", "expected"), [(0.01, SECOND), (0.05, FIRST), (0.069, FIRST)]
)
def test_a_further_one_has_to_be_worth_the_margin(second: float, expected: str) -> None:
    rows = dense(0.3, 0.3, 0.3, 0.3)
    found = advice(*rows, choice(FIRST, 0.07), choice(SECOND, second))
    assert found.recommended.name == expected
    assert found.needs[0] == f"needs {LADDER[expected].needs}"


def test_the_optimizer_decides_and_where_it_is_not_known_both_are_named() -> None:
    rows = [*dense(0.3, 0.3, 0.3, 0.3), choice(FIRST, 0.07), choice(SGD, 0.01)]
    found = advice(*rows)
    assert found.recommended.name == FIRST
    assert f"with SGD use {SGD}: 110 ms a step" in found.needs
    for steps, expected in (("adam", FIRST), ("sgd", SGD)):
        known = advise(in_order(rows), 8, MARGIN, cast(Steps, steps))
        assert known.recommended.name == expected
        assert len(known.needs) == 1


def test_what_is_for_sgd_alone_is_no_reason_to_compress() -> None:
    found = advice(*dense(0.02, 0.02, 0.02, 0.02), choice(SGD, 0.0), margin=0.1)
    assert found.recommended.name == "wfbp"
    assert "no margin" not in names(found)
