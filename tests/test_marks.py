"""The mark `gpu`: skipped with the reason where there is no CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest_plugins = "pytester"

PROGRAM = """
import pytest, warnings
from gradtide.core.unproven import warn_unproven

@pytest.mark.gpu
def test_on_a_gpu():
    warn_unproven("What is marked", "its words")

def test_elsewhere():
    with pytest.raises(UserWarning, match="has run for minutes"):
        warn_unproven("What is not marked", "its words")
"""


@pytest.mark.parametrize("there", [False, True])
def test_it_is_skipped_without_one_and_may_be_unproven(
    there: bool, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    root = Path(__file__).parent.parent
    pytester.makepyprojecttoml((root / "pyproject.toml").read_text(encoding="utf-8"))
    conftest = Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")
    pytester.makepyfile(**{"tests/conftest": conftest, "tests/test_marked": PROGRAM})
    run = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--rootdir=.")
    run.assert_outcomes(passed=2 if there else 1, skipped=0 if there else 1)
    if not there:
        run.stdout.fnmatch_lines("SKIPPED*torch finds no CUDA device here")
