"""Shared set-up: one thread a process, so that ranks can fork; `--whole`; `gpu`."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

# Torch's store looks up the name of whoever connects, and answers nobody meanwhile.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
gc.disable()  # until all is imported: the heap would be looked through again and again

EACH = 3  # one in so many cases of a `product` runs where slow tests are left out
Product = Callable[..., list[tuple[Any, ...]]]
Run = Callable[..., Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole",
        action="store_true",
        help="run products of features whole, not only so that every pair meets",
    )


def pytest_configure() -> None:
    # To ask for a CUDA device otherwise leaves none to ranks that are forked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def pytest_collectstart() -> None:
    import torch  # not above: the process that only hands out tests needs none

    # Forking a process that has an OpenMP pool may hang the child.
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        # torch's notes for each other device that it is to be seeded, and the stack:
        # in some tests that took longer than the training.
        torch.manual_seed = torch.default_generator.manual_seed


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Frameworks are not loaded where all tests of a file are slow, and left out."""
    if "not slow" in config.option.markexpr and collection_path.suffix == ".py":
        text = collection_path.read_text(encoding="utf-8")
        if "pytestmark = [pytest.mark.slow" in text:
            return True
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`pairs(a=..., b=..., c=...)`: parametrized so that every pair of values meets.

    With `--whole`, by all combinations.
    """
    mark = metafunc.definition.get_closest_marker("pairs")
    if mark is not None:
        whole = metafunc.config.getoption("--whole")
        axes = mark.kwargs.values()
        cases = list(itertools.product(*axes)) if whole else pairwise(*axes)
        ids = ["-".join(map(_name, case)) for case in cases]
        metafunc.parametrize(list(mark.kwargs), cases, ids=ids)


def _name(value: Any) -> str:
    return getattr(value, "__name__", str(value)).strip("_")


@pytest.hookimpl(trylast=True)  # what -k and -m leave out is no case here
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Tests marked `gpu` may be told that what they run never ran on one.

    Where slow ones are left out, so are most cases of those that are marked `product`.
    """
    told = "ignore:.* has run for minutes:UserWarning"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings(told))
    if "not slow" in config.option.markexpr:
        chosen = some_cases(items)
        left_out = set(items) - set(chosen)
        config.hook.pytest_deselected(items=[i for i in items if i in left_out])
        items[:] = chosen


def some_cases(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Without most cases of products: the first stays, and few of the others.

    A checksum of the name chooses one in `each`: it is in step with no axis of the
    parameters, and all workers find the same.
    """
    begun: set[str] = set()
    chosen = []
    for item in items:
        function = item.nodeid.partition("[")[0]
        mark = item.get_closest_marker("product")
        each = mark.kwargs.get("each", EACH) if mark else 1
        if function not in begun or zlib.crc32(item.nodeid.encode()) % each == 0:
            chosen.append(item)
        begun.add(function)
    return chosen


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch finds no CUDA device here")


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("--whole"):
        from tests import tried

        tried.WHOLE.append(True)
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Run]:
    """Calls functions in a process in which Triton interprets its kernels.

    That has to be chosen before Triton is imported.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(abs, 0).result()  # the process starts
        yield lambda function, *given: pool.submit(function, *given).result()


@pytest.fixture
def product(request: pytest.FixtureRequest) -> Product:
    """Combinations of features: all with `--whole`, else so that every pair meets.

    `other` asks for ones that are not chosen without it, for another number of ranks.
    """
    if request.config.getoption("--whole"):
        return lambda *axes, other=False: list(itertools.product(*axes))
    return pairwise


def pairwise(*axes: Iterable[Any], other: bool = False) -> list[tuple[Any, ...]]:
    """Few combinations, in which any two values of different axes meet."""
    every = list(itertools.product(*axes))
    if other:
        chosen_first = pairwise(*axes)
        every = [case for case in every if case not in chosen_first]
    pairs = [(_pairs(case), case) for case in every]
    missing = set().union(*(met for met, _ in pairs))
    chosen: list[tuple[Any, ...]] = []
    while missing:
        met, best = max(pairs, key=lambda pair: len(pair[0] & missing))
        missing -= met
        chosen.append(best)
    return chosen


def _pairs(case: Sequence[Any]) -> set[Any]:
    return set(itertools.combinations(enumerate(map(repr, case)), 2))
