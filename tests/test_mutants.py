"""The list of mutants is one of this code: benchmarks/mutant_list.py."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.test_layers import ROOT

TESTS = Path(__file__).parent
LIST = TESTS.parent / "benchmarks" / "mutant_list.py"
MUTANTS = runpy.run_path(str(LIST))["MUTANTS"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_its_text_stands_in_its_file_once(mutant: Any) -> None:
    code = (ROOT / mutant.file).read_text(encoding="utf-8")
    changed = mutant.apply(code)
    assert changed != code
    compile(changed, mutant.file, "exec")
    assert mutant.wrong
    assert all((TESTS / name).exists() for name in mutant.tests)


def test_one_that_has_moved_is_refused() -> None:
    with pytest.raises(ValueError, match="its text occurs 0 times"):
        MUTANTS[0].apply("")


def test_there_are_many_each_of_its_own_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
