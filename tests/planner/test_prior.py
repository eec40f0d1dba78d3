"""What recipes cost in steps: as the record says, and what the planner makes of it."""

from __future__ import annotations

import json
import math
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradtide.planner.advice import advise
from gradtide.planner.prior import NONE, UNKNOWN, Cost, cost_of
from gradtide.planner.search import Choice, in_order
from gradtide.planner.virtual import Prediction
from gradtide.scheme import parse

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RECORD = BENCHMARKS / "records/prior_202611.json"
TOPKA2A = "topka2a(0.02, schedule='local', warmup=60, wire='e3m0')"
EXDYNA = "exdyna(0.01, schedule='local', warmup=240, wire='e3m0')"
# By the short names of the record.
KNOWN = {
    "int8": "wfbp(wire='int8')",
    "e3m0": "dear(wire='e3m0')",
    "topka2a": "topka2a(0.02, schedule='local', warmup=60)",
    "topka2a e3m0": TOPKA2A,
    "exdyna": EXDYNA,
    "oktopk": "oktopk(0.01, schedule='local', warmup=240)",
    "diloco 10": "diloco(every=10, warmup=20)",
    "diloco 30": "diloco(warmup=240)",
    "sparseloco 10": "sparseloco(every=10, warmup=30)",
    "diloco 10 cold": "diloco(every=10)",
    "diloco 30 cold": "diloco",
}


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    return runpy.run_path(str(BENCHMARKS / "prior.py"))


@pytest.mark.parametrize("name", KNOWN)
def test_the_table_is_what_the_record_says(name: str, program: dict[str, Any]) -> None:
    record = json.loads(RECORD.read_text())
    row = program["summary"](program["costs"](record))[name]
    assert row == record["summary"][name]
    found = cost_of(parse(KNOWN[name]))
    ends = program["LENGTHS"][0]
    # Losses beyond the curve count as its end: nobody knows how many more it is.
    most = math.inf if row["most"] >= 400 / ends - 1 else row["most"]
    assert found.shares == pytest.approx((row["typical"], row["least"], most))
    assert found.tasks == row["tasks"]


def test_steps_of_k_fac_are_what_its_record_says() -> None:
    record = json.loads(
        (BENCHMARKS / "records/curvature_learning_202611.json").read_text()
    )
    shares, ends = [], []
    for task in record["best"].values():
        own, plain = (
            task["kfac"],
            min(task["sgd"], task["adamw"], key=lambda r: r["median"]),
        )
        shares.append(own["median"] / plain["median"] - 1)
        ends += [min(own["steps"]) / max(plain["steps"]) - 1]
        ends += [max(own["steps"]) / min(plain["steps"]) - 1]
    found = cost_of(parse("dp_kfac"))
    expected = sum(shares) / len(shares), min(ends), max(ends)
    assert found.shares == pytest.approx(expected, abs=0.01)
    assert found.tasks == len(shares)


def test_fewer_steps_pay_where_nothing_is_waited_for() -> None:
    """A step that takes a tenth longer, of which at least 27 % fewer are needed."""
    steps = dict.fromkeys(("wfbp", "wfbp(wire='bf16')"), 1.0) | {"dp_kfac": 1.1}
    hidden = {"exposed": 0.01}
    choices = [
        replace(one, prediction=replace(one.prediction, **hidden))
        for one in (choice(name, step) for name, step in steps.items())
    ]
    found = advise(in_order(choices), 4)
    assert found.recommended.name == "dp_kfac"
    assert "needs at least 9.1 % fewer steps than wfbp" in found.verdict
    assert not found.rules


def test_a_loss_is_as_good_as_a_number_of_dense_steps(program: dict[str, Any]) -> None:
    steps, lengths = program["dense_steps"], program["LENGTHS"]
    curve = [3.0 - 0.1 * i for i in range(len(lengths))]
    for length, loss in zip(lengths, curve, strict=True):
        assert steps(curve, loss) == pytest.approx(length)
    between = steps(curve, 2.95)
    assert between == pytest.approx((lengths[0] * lengths[1]) ** 0.5)
    assert steps(curve, 9.0) == pytest.approx(lengths[0])
    assert steps(curve, 0.0) == pytest.approx(lengths[-1])


def test_what_was_not_measured_says_so() -> None:
    others = "topka2a(0.001, schedule='local')", "micro(0.01, schedule='local')"
    for text in ("diloco(every=5)", "topk(0.01)", "wfbp(wire='sign')", *others):
        assert cost_of(parse(text)) is UNKNOWN
    assert "nobody knows" in UNKNOWN.words
    assert str(Cost(0.04, 0.0, 0.12, 5).words) == "4 % more (0 to 12 % on 5 tasks)"
    cold = cost_of(parse("diloco"))
    assert cold.words == "150 % more and up (73.8 % at the least on 3 tasks)"
    assert Cost(-0.04, -0.1, 0.1, 1).words == "4 % fewer (-10 to 10 % in the race)"


def choice(name: str, step: float, warmup: tuple[int, float] | None = None) -> Choice:
    told = Prediction(step, 0.03, 0.06, 0.0, step, 0.01, step - 0.1, 1e6, 0.1, 4)
    return Choice(name, parse(name), told, warmup=warmup)


DENSE = [choice("wfbp", 1.0), choice("wfbp(wire='bf16')", 0.6)]


def test_a_recipe_has_to_be_sooner_in_the_worst_run() -> None:
    most = cost_of(parse(TOPKA2A)).most
    for times, name in ((0.99, TOPKA2A), (1.01, "wfbp(wire='bf16')")):
        sparse = choice(TOPKA2A, times * 0.6 / (1 + most))
        found = advise(in_order([*DENSE, sparse]), 8)
        assert found.recommended.name == name


def test_the_plainer_one_is_named_where_two_cannot_be_told_apart() -> None:
    near = [choice(TOPKA2A, 0.2), choice(EXDYNA, 0.19)]
    assert advise(in_order([*DENSE, *near]), 8).recommended.name == TOPKA2A
    apart = [near[0], choice(EXDYNA, 0.1)]
    assert advise(in_order([*DENSE, *apart]), 8).recommended.name == EXDYNA


def test_a_warm_up_counts_in_a_short_run() -> None:
    sparse = choice(TOPKA2A, 0.2, warmup=(240, 0.9))
    choices = in_order([*DENSE, sparse])
    assert advise(choices, 8, total=2000).recommended is sparse
    assert advise(choices, 8, total=250).recommended.name == "wfbp(wire='bf16')"
    found = advise(choices, 8, total=1000)
    typical, worst, best = found.sooner(sparse)
    steps = 1000 * (1 + cost_of(parse(TOPKA2A)).typical)
    assert typical == pytest.approx(600 / (240 * 0.9 + (steps - 240) * 0.2))
    assert worst <= typical <= best


def test_a_margin_takes_the_place_of_what_is_known() -> None:
    choices = in_order([*DENSE, choice(TOPKA2A, 0.4)])
    assert advise(choices, 8, 0.4).recommended.name == TOPKA2A
    assert advise(choices, 8, 0.6).recommended.name == "wfbp(wire='bf16')"


def test_exact_ones_cost_nothing() -> None:
    found = advise(in_order(DENSE), 8)
    assert {found.cost(one) for one in DENSE} == {NONE}
    assert found.sooner(found.dense) == (1.0, 1.0, 1.0)
