"""Marks: `gpu` is skipped without a CUDA device; of a `product` some cases run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest_plugins = "pytester"

ROOT = Path(__file__).parent.parent

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

CASES = """
import pytest

@pytest.mark.product
@pytest.mark.parametrize("first", range(10, 30))
@pytest.mark.parametrize("second", "abcdefghijklmnopqrst")
def test_many(first, second): ...

@pytest.mark.product(each=10**9)
@pytest.mark.parametrize("value", [3, 4, 5])
class TestThem:
    def test_one(self, value): ...
    def test_other(self, value): ...

@pytest.mark.parametrize("value", range(9))
def test_all(value): ...
"""


def put(pytester: pytest.Pytester, program: str) -> None:
    """Tests beside a copy of our settings and hooks."""
    pytester.makepyprojecttoml((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    conftest = Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")
    pytester.makepyfile(**{"tests/conftest": conftest, "tests/test_marked": program})


@pytest.mark.parametrize("there", [False, True])
def test_it_is_skipped_without_one_and_may_be_unproven(
    there: bool, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    put(pytester, PROGRAM)
    run = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--rootdir=.")
    run.assert_outcomes(passed=2 if there else 1, skipped=0 if there else 1)
    if not there:
        run.stdout.fnmatch_lines("SKIPPED*torch finds no CUDA device here")


def left(pytester: pytest.Pytester, *options: str) -> tuple[set[str], set[str]]:
    """The names of cases that run, and of those that do not."""
    *_, record = pytester.inline_genitems(*options, "-p", "no:cacheprovider")
    deselected = record.getcalls("pytest_deselected")
    found = {item.nodeid for call in deselected for item in call.items}
    every = {call.item.nodeid for call in record.getcalls("pytest_itemcollected")}
    names = {name: name.partition("::")[2] for name in every}
    return {names[n] for n in every - found}, {names[n] for n in found}


def test_of_a_product_some_cases_run_where_slow_tests_are_left_out(
    pytester: pytest.Pytester,
) -> None:
    put(pytester, CASES)
    run, out = left(pytester, "-m", "not slow")
    assert {f"test_all[{value}]" for value in range(9)} <= run
    assert {f"TestThem::test_{which}[3]" for which in ("one", "other")} <= run
    assert "test_many[a-10]" in run
    many = [{n for n in names if n.startswith("test_many")} for names in (run, out)]
    assert 100 < len(many[0]) < 170
    # No axis is in step: of each value's cases some run, and some do not.
    for value in (*range(10, 30), *"abcdefghijklmnopqrst"):
        assert all(any(str(value) in n[9:] for n in names) for names in many), value
    # Of those that are asked for the first runs, too.
    run, _ = left(pytester, "-m", "not slow", "-k", "test_one and not 3")
    assert run == {"TestThem::test_one[4]"}


@pytest.mark.parametrize("options", [(), ("-m", "not alone and not waits")])
def test_of_a_product_all_cases_run_with_slow_tests(
    options: tuple[str, ...], pytester: pytest.Pytester
) -> None:
    put(pytester, CASES)
    run, out = left(pytester, *options)
    assert len(run) == 400 + 6 + 9
    assert not out
