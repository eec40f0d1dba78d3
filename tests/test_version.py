"""One version, wherever it is asked for; and what an installed package brings along."""

from __future__ import annotations

import re
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

import gradtide

ROOT = Path(__file__).parent.parent


def test_the_version_is_written_in_one_place() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in project
    assert 'path = "src/gradtide/__init__.py"' in project
    assert not re.search(r"^version = ", project, re.M)


def test_the_changelog_begins_with_this_version_or_what_is_not_released() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first = re.findall(r"^## \[?([^]\s]+)", text, re.M)[0]
    assert first in ("Unreleased", gradtide.__version__)


def test_an_installed_package_is_whole() -> None:
    if Path(gradtide.__file__).is_relative_to(ROOT / "src"):
        pytest.skip("it runs from its sources: .ci/dist installs it")
    assert Path(gradtide.__file__).is_relative_to(sys.prefix)
    found = distribution("gradtide")
    assert found.version == gradtide.__version__
    needed = [each for each in found.requires or () if "extra ==" not in each]
    assert [re.split(r"[<>=]", each)[0] for each in needed] == ["numpy", "torch"]
    names = {str(file) for file in found.files or ()}
    assert "gradtide/py.typed" in names
    assert not [name for name in names if name.startswith("tests")]
    assert "Apache-2.0" in (found.metadata["License-Expression"] or "")
