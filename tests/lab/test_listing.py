"""What `gradtide schemes` prints."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console, Group

from gradtide.lab.contestants import BASELINES
from gradtide.lab.listing import everything, recommended
from gradtide.scheme import RECIPES, parse
from gradtide.scheme.recommended import RECOMMENDED


def lines(shown: Group, width: int) -> list[str]:
    file = StringIO()
    Console(width=width, file=file).print(shown, crop=False)
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_recipes_are_never_cut(width: int) -> None:
    shown = lines(recommended(), width)
    for row in RECOMMENDED:
        assert row.recipe in shown
        assert parse(row.recipe)
    words = " ".join(" ".join(shown).split())
    assert all(f"{row.when}. Sends {row.sends};" in words for row in RECOMMENDED)


def test_everything_has_all_names_and_their_calls() -> None:
    shown = lines(everything(), 4000)
    for name, scheme in RECIPES.items():
        assert shown[shown.index(name) + 1].strip() == repr(scheme)
    assert set(BASELINES) <= set(shown)
