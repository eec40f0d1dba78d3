"""What is exported, what the documentation names and what the parser knows are one."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gradtide
from gradtide.collectives import COLLECTIVES, WRAPPERS
from gradtide.scheme import NAMES, RECIPES, parse
from gradtide.selectors import SELECTORS

ROOT = Path(__file__).parents[1]
PARTS = ("collectives", "core.schedule", "fusion", "kfac", "scheme", "selectors")
PUBLIC = [name for name in gradtide.__all__ if not name.startswith("_")]
OBJECTS = {name: getattr(gradtide, name) for name in PUBLIC}
CLASSES = {name: x for name, x in OBJECTS.items() if is_dataclass(x)}
CLASSES = {name: x for name, x in CLASSES.items() if isinstance(x, type)}
METHODS = [name for name in dir(gradtide.Replica) if not name.startswith("_")]
CODE = re.compile(r"^```.*?^```|`[^`]+`", re.DOTALL | re.MULTILINE)


def code(*paths: Path) -> str:
    """What is set as code in these pages."""
    return "\n".join(span for path in paths for span in CODE.findall(path.read_text()))


def pages() -> list[Path]:
    return [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]


# - Names ------------------------------------------------------------------------------


def test_all_is_what_can_be_imported() -> None:
    found = {
        name
        for name, value in vars(gradtide).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert found == set(PUBLIC)
    assert len(PUBLIC) == len(set(PUBLIC))
    assert gradtide.__version__


@pytest.mark.parametrize("name", NAMES)
def test_what_a_text_may_name_is_exported_under_that_name(name: str) -> None:
    assert OBJECTS[name] is NAMES[name]


@pytest.mark.parametrize("name", RECIPES)
def test_python_builds_what_a_text_stands_for(name: str) -> None:
    scheme = parse(name)
    assert eval(repr(scheme), OBJECTS.copy()) == scheme


def test_the_documented_scheme() -> None:
    built = gradtide.Scheme(gradtide.OkTopk(0.01), schedule=gradtide.DEAR)
    assert built == gradtide.parse("Scheme(OkTopk(0.01), schedule=DEAR)")


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_is_in_the_changelog_and_in_the_documentation(name: str) -> None:
    word = re.compile(rf"\b{name}\b")
    assert word.search(code(ROOT / "CHANGELOG.md")), f"CHANGELOG.md: `{name}`"
    assert word.search(code(*pages())), f"README.md or docs: `{name}`"


def test_parts_that_the_documentation_builds_are_exported() -> None:
    known = {
        name
        for part in PARTS
        for name, value in vars(importlib.import_module(f"gradtide.{part}")).items()
        if is_dataclass(value) and not name.startswith("_")
    }
    text = code(ROOT / "CHANGELOG.md", *pages())
    built = set(re.findall(r"\b([A-Z]\w+)\(", text)) & known
    assert {"BySize", "Cuts", "KFAC", "Scheme"} <= built
    assert built <= set(PUBLIC)


# - Docstrings -------------------------------------------------------------------------


def section(value: Any, title: str) -> str:
    """A section of a docstring in Google's style; empty if it has none."""
    doc = inspect.getdoc(value) or ""
    found = re.search(rf"^{title}:\n((?:    .*\n?|\n)+)", doc, re.MULTILINE)
    return found[1] if found else ""


def arguments(value: Any) -> set[str]:
    return set(
        re.findall(r"^    \*{0,2}(\w+): \S", section(value, "Args"), re.MULTILINE)
    )


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_is_documented(name: str) -> None:
    own = {f.name for f in fields(CLASSES[name]) if f.init}
    assert arguments(CLASSES[name]) == own


@pytest.mark.parametrize("collective", [*COLLECTIVES, *WRAPPERS, gradtide.Auto])
def test_collectives_say_what_they_cost_and_what_is_left(collective: type) -> None:
    doc = " ".join((inspect.getdoc(collective) or "").split())
    assert re.search(r"\bCost\b.*:", doc)
    assert re.search(r"\b[Rr]esidual:", doc)
    assert re.search(r"\b(19|20)\d\d\b|`Dense`", doc), "the paper, with its year"


@pytest.mark.parametrize("name", ["replicate", "parse", "recipe"])
def test_functions_are_documented(name: str) -> None:
    _check(OBJECTS[name])


@pytest.mark.parametrize("name", METHODS)
def test_what_a_replica_can_do_is_documented(name: str) -> None:
    value = inspect.getattr_static(gradtide.Replica, name)
    if isinstance(value, property):
        assert value.__doc__
        return
    _check(value)
    doc = " ".join((inspect.getdoc(value) or "").split())
    assert "Local." in doc or "collective call" in doc, "who has to call it?"


@pytest.mark.parametrize("selector", SELECTORS)
def test_selectors_are_documented(selector: type) -> None:
    _check(selector.__call__)


def _check(function: Any) -> None:
    """Every argument, and what is returned, is documented."""
    signature = inspect.signature(function)
    assert arguments(function) == set(signature.parameters) - {"self"}
    silent = signature.return_annotation in (None, "None")
    assert bool(section(function, "Returns")) != silent


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_has_a_docstring(name: str) -> None:
    value = OBJECTS[name]
    if isinstance(value, gradtide.Schedule):  # a string behind a constant
        text = inspect.getsource(gradtide.Schedule)
        module = inspect.getsource(importlib.import_module("gradtide.core.schedule"))
        assert re.search(
            rf'^{name} = .*\n"""\w', module.replace(text, ""), re.MULTILINE
        )
    else:
        assert inspect.getdoc(value)
