"""One table of recommended recipes, and all that is made of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from gradtide.doctor.advice import gain, parse_model
from gradtide.planner.advice import advise
from gradtide.planner.network import Network
from gradtide.planner.search import DENSE, rank
from gradtide.planner.virtual import simulate
from gradtide.planner.watch import kind_of
from gradtide.runtime.guards.validation import validate_optimizer
from gradtide.scheme import parse
from gradtide.scheme.config import undecided
from gradtide.scheme.recommended import (
    RECOMMENDED,
    candidates,
    made_for,
    markdown,
    unsuited,
)
from gradtide.simulate.grid import replayed

ROOT = Path(__file__).parent.parent.parent
RECIPES = [row.recipe for row in RECOMMENDED]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_can_be_trained_with(recipe: str) -> None:
    model = nn.Linear(4, 4)
    made = torch.optim.SGD if made_for(recipe) == "sgd" else torch.optim.AdamW
    optimizer = made(model.parameters(), lr=0.1)
    validate_optimizer(model, optimizer, parse(recipe))


def test_the_table_begins_with_what_every_plan_is_held_against() -> None:
    assert RECIPES[: len(DENSE)] == ["wfbp", "dear", *RECIPES[2:4]]
    assert set(RECIPES[: len(DENSE)]) == set(DENSE)
    assert len(RECIPES) <= 15
    assert len(RECIPES) == len(set(RECIPES))


def test_readme_has_the_short_table_and_the_page_on_schemes_the_whole_one() -> None:
    short = [row for row in RECOMMENDED if row.short]
    assert len(short) == 5
    for path, rows in (("README.md", short), ("docs/schemes.md", RECOMMENDED)):
        text, table = (ROOT / path).read_text(encoding="utf-8"), markdown(rows)
        assert table in text, f"{path} has to have this table:\n{table}"


def test_candidates_are_all_but_what_has_a_reason() -> None:
    found = candidates()
    assert set(found) == {row.recipe for row in RECOMMENDED if not row.left_out}
    for scheme in found.values():
        assert scheme.preconditioner is None
        assert undecided(scheme) is None


@pytest.mark.product
@pytest.mark.parametrize("row", RECOMMENDED, ids=RECIPES)
def test_what_a_row_says_of_bytes_is_what_is_sent(row: object) -> None:
    """Shares that are given in words or per cent, on 4 and 8 hosts."""
    assert row in RECOMMENDED
    row = next(each for each in RECOMMENDED if each == row)
    words = row.sends.rpartition("about ")[2] if "about" in row.sends else row.sends
    shares = {"as much as DDP": 1.0, "half": 0.5, "a quarter": 0.25, "an eighth": 0.125}
    if words.endswith(" %"):
        shares[words] = float(words.removesuffix(" %")) / 100
    if words not in shares:
        assert row.left_out  # it is not predicted either
        return
    trace = replayed("resnet50", 300.0)
    for hosts in (4, 8):
        network = Network.ideal(hosts, 1, 1e9)
        sent, dense = (
            simulate(trace, parse(text), network).sent_bytes
            for text in (row.recipe, "wfbp")
        )
        assert sent / dense == pytest.approx(shares[words], rel=0.3)


def test_an_optimizer_is_known_by_its_steps() -> None:
    params = [nn.Parameter(torch.ones(3))]
    assert kind_of(torch.optim.SGD(params, lr=0.1, momentum=0.9)) == "sgd"
    assert kind_of(torch.optim.AdamW(params)) == "adam"
    assert kind_of(torch.optim.LBFGS(params)) == "any"


def test_what_is_for_another_optimizer_says_so() -> None:
    (sgd,) = (row.recipe for row in RECOMMENDED if row.steps == "sgd")
    assert "Adam" in unsuited(sgd, "adam")
    assert "SGD" in unsuited(sgd, "adam")
    assert not unsuited(sgd, "any")
    assert not unsuited(sgd, "sgd")
    assert not unsuited("topk(0.3)", "adam")


@pytest.mark.product(each=6)
@pytest.mark.parametrize("rate", [1e7, 1e8, 1e9, 1e11])
def test_plan_and_doctor_recommend_what_the_table_has(rate: float) -> None:
    """And the same of it, for every network."""
    network, model = Network.ideal(4, 1, rate), parse_model("params=5M,step=200ms")
    found = advise(rank(model, network), network.size)
    assert found.recommended.name in RECIPES
    words, _ = gain(model, network)
    assert re.search(r"use (.*?): (\d|about)", words).group(1) == found.recommended.name  # type: ignore[union-attr]
