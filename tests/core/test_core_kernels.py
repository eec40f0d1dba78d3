"""What is compiled is made ready once, by numba alone on a machine, or done without."""

from __future__ import annotations

import builtins
import importlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from gradtide.core import kernels
from gradtide.core.kernels import Kernels

SLOWER = "sums are taken by hand, which takes an hour"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes Kernels of a module with this text."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(text: str, compiler: kernels.Compiler = kernels.NUMBA) -> Kernels:
        name = f"kernels_of_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        load = lambda: importlib.import_module(name)  # noqa: E731
        return Kernels(load, "sums", SLOWER, compiler)

    return make


def test_a_program_may_have_replaced_print(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    quiet = lambda *_: None  # noqa: E731
    monkeypatch.setattr(builtins, "print", quiet)
    found = made(
        "import sys\nassert print.__module__ == 'builtins'\ndef total(x): return sum(x)"
    )
    assert found.module().total([1, 2]) == 3
    seen = []
    found.prepare("", lambda _: seen.append(builtins.print))
    assert seen == [kernels.PRINT]
    assert builtins.print is quiet


def test_what_cannot_be_loaded_is_done_without(made: Any) -> None:
    found = made("raise AttributeError('no print')")
    with pytest.warns(UserWarning, match="no print.*by hand.*NUMBA_CACHE_DIR"):
        assert found.module() is None
    assert found.module() is None  # a warning would be an error
    found.prepare("", lambda _: pytest.fail("there is nothing to call"))


def test_what_cannot_be_compiled_is_done_without(made: Any) -> None:
    pytest.importorskip("numba")
    found = made("")

    def refused(_: Any) -> None:
        raise OSError("no space left")

    with pytest.warns(UserWarning, match="no space left.*by hand"):
        found.prepare("", refused)
    assert found.module() is None
    found.prepare("another", refused)


def test_without_numba_it_is_named(made: Any) -> None:
    with pytest.warns(UserWarning, match=r"^numba is not installed.*gradtide\[fast\]"):
        assert made("import a_package_that_is_not_here").module() is None


def test_without_triton_it_is_named(made: Any) -> None:
    found = made("import a_package_that_is_not_here", kernels.TRITON)
    with pytest.warns(UserWarning, match=r"^Triton is not installed.*gradtide\[gpu\]"):
        assert found.module() is None


def test_without_a_compiler_for_c_triton_is_done_without(made: Any) -> None:
    found = made("", kernels.TRITON)

    def refused(_: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    with pytest.warns(UserWarning, match="Triton does not work.*by hand.*CC"):
        found.prepare("", refused)
    assert found.module() is None


def test_compiling_is_told_and_once_is_enough(
    made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("numba")
    found = made("import numba\n@numba.njit\ndef total(x): return x + 1")
    with caplog.at_level(logging.INFO, "gradtide"):
        for _ in range(2):
            found.prepare("int", lambda module: module.total(1))
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == 2
        assert "once on this machine" in told[0]
        found.prepare("again", lambda module: module.total(1))  # is there already
    assert len(caplog.records) == 2


def test_one_process_compiles_and_none_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernels.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(kernels, "LONGEST", 0.2)
    held = kernels._lock()
    naps = []
    monkeypatch.setattr(kernels.time, "sleep", lambda s: naps.append(s))
    with kernels._alone():
        assert naps  # it has waited, and goes on nevertheless
    os.close(held)
    naps.clear()
    with kernels._alone():
        assert not naps


def test_a_folder_of_somebody_else_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = tmp_path / "not there"
    monkeypatch.setattr(kernels.tempfile, "gettempdir", lambda: str(missing))
    with kernels._alone():
        pass
