"""One pass finds what is not at most the threshold, with numba and without."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import pytest
import torch

from gradtide.selectors import kernels

INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=["numba", "numpy"])
def tool(request, monkeypatch):
    if request.param == "numba":
        pytest.importorskip("numba")
    else:
        monkeypatch.setitem(sys.modules, "gradtide.selectors.fast", None)
    kernels.KERNELS.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernels._compact()
    yield request.param
    kernels.KERNELS.forget()


def reference(x: torch.Tensor, threshold: float) -> list[int]:
    return [i for i, v in enumerate(x.tolist()) if not abs(v) <= threshold]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("threshold", [-1.0, 0.0, 0.5, 2.0, 100.0, INF])
def test_finds_what_the_definition_finds(tool, dtype, n, threshold) -> None:
    rng = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=rng).to(dtype)
    for i, special in enumerate([NAN, INF, -INF, 0.0, -0.0, 0.5, -0.5, -NAN, 1e-40]):
        x[7 * i : 7 * i + 1] = special
    found = kernels.above(x, threshold, n)
    assert found.dtype == torch.int32
    assert found.tolist() == reference(x, threshold)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 63, 64, 1000])
@pytest.mark.parametrize("threshold", [-1.0, 0.5, INF])
@pytest.mark.parametrize("limit", [10, 1000])
def test_entries_come_with_their_values(tool, dtype, n, threshold, limit) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    x[3:4], x[60:61], x[900:901] = NAN, -INF, -NAN
    where, values = kernels.entries(x, threshold, limit)
    assert torch.equal(where, kernels.above(x, threshold, limit))
    assert values.dtype == dtype
    assert torch.equal(values.nan_to_num(7.0), x[where].nan_to_num(7.0))


@pytest.mark.parametrize("begin", [1, 2, 3])
def test_parts_that_are_not_aligned(tool, begin) -> None:
    x = torch.randn(500, generator=torch.Generator().manual_seed(0))[begin:]
    assert kernels.above(x, 1.0, 500).tolist() == reference(x, 1.0)


def test_runs_over_several_chunks(tool) -> None:
    n = 2 * kernels.CHUNK + 100
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    expected = (x.abs() > 2).nonzero().squeeze(1)
    assert torch.equal(kernels.above(x, 2.0, n).long(), expected)
    assert torch.equal(kernels.above(x, 2.0, 4000).long(), expected[:4000])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [1, 63, 64, 65, 99, 130])
def test_limit_keeps_the_first(tool, limit, dtype) -> None:
    found = kernels.above(torch.ones(129, dtype=dtype), 0.5, limit)
    assert found.tolist() == list(range(min(limit, 129)))


def test_threshold_is_compared_in_the_dtype_of_x(tool) -> None:
    x = torch.tensor([0.1], dtype=torch.float32)
    assert len(kernels.above(x, float(x[0]), 1)) == 0
    assert len(kernels.above(x, float(np.nextafter(x.numpy()[0], 0)), 1)) == 1


def test_without_numba_it_works_and_says_so_once(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gradtide.selectors.fast", None)
    kernels.KERNELS.forget()
    x = torch.tensor([1.0, -3.0, 2.0])
    with pytest.warns(UserWarning, match=r"gradtide\[fast\]"):
        assert kernels.above(x, 1.5, 3).tolist() == [1, 2]
    assert kernels.above(x, 1.5, 3).tolist() == [1, 2]  # a warning would be an error
    kernels.KERNELS.forget()
