"""Schemes as text for a terminal: those that are recommended, and all that have names.

Recipes stand in lines of their own, so that they are never cut and can be copied.
"""

from __future__ import annotations

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from gradtide.lab.contestants import BASELINES
from gradtide.scheme import RECIPES
from gradtide.scheme.recommended import RECOMMENDED

INDENT = 4


def recommended() -> Group:
    """The recommended recipes: those to be tried in turn, then those for a reason."""
    parts: list[Text | Padding] = []
    for heading, short in (
        ("Begin at the top, and go down only if the step is still too long.", True),
        ("Beside these, where the reason is yours:", False),
    ):
        parts.append(Text(heading))
        for row in RECOMMENDED:
            if row.short == short:
                told = f"{row.when}. Sends {row.sends}; needs {row.needs}."
                parts += [Text(), *_entry(row.recipe, told)]
        parts.append(Text())
    return Group(*parts[:-1])


def everything() -> Group:
    """All names, with the constructor calls that they stand for, and the baselines."""
    told = {name: repr(scheme) for name, scheme in RECIPES.items()}
    for name, (meaning, _) in BASELINES.items():
        told[name] = f"{meaning}; to compare with only"
    return Group(*(part for entry in told.items() for part in _entry(*entry)))


def _entry(recipe: str, words: str) -> list[Text | Padding]:
    whole = Text(recipe, style="bold", no_wrap=True, overflow="ignore")
    return [whole, Padding(Text(words), (0, 0, 0, INDENT))]
