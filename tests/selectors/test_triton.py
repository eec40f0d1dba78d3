"""Triton's kernels against plain torch, in Triton's interpreter; and they compile.

Whether a GPU orders memory as the interpreter does is what those marked `gpu` test.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.conftest import Run
from tests.waits import synchronised
from torch import Tensor

from gradtide.selectors import Threshold, kernels

pytest.importorskip("triton")

BLOCK = 4096  # the kernels'; asserted below


# What follows, up to the tests, runs in the other process.


def values(n: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Multiples of 1/4 that every dtype holds."""
    rng = torch.Generator().manual_seed(seed)
    return (torch.randint(-20, 21, (n,), generator=rng) / 4).to(dtype)


def same(actual: Tensor, expected: Tensor) -> None:
    if not actual.is_floating_point():
        assert actual.dtype == torch.int32
        actual = actual.long()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def check_above(x: Tensor, threshold: float, limit: int, device: str = "cpu") -> int:
    """Triton's kernels on `device`, and torch on a CPU; how many there are."""
    from gradtide.selectors import triton_kernels

    assert triton_kernels.BLOCK == BLOCK
    where = (~(x.abs() <= threshold)).nonzero()[:limit, 0]
    there = x.to(device)
    for with_values in (False, True):
        scan = triton_kernels.scan(there, threshold, limit, with_values)
        number = int(scan.number)
        same(scan.indices[:number].cpu(), where)
        assert (scan.values is None) is not with_values
        if scan.values is not None:
            same(scan.values[:number].cpu(), x[where])
    same(there.cpu(), x)
    return len(where)


# The tests.

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1, 31, BLOCK - 1, BLOCK, 2 * BLOCK + 33])
def test_lengths(interpreted: Run, n: int, dtype: torch.dtype) -> None:
    found = interpreted(check_above, values(n, dtype, 0), 4.0, n)
    assert n < 100 or 0.1 * n < found < 0.5 * n


@pytest.mark.parametrize(
    ("threshold", "found"), [(-1.0, 5000), (0.0, 4500), (9.0, 3000), (float("inf"), 0)]
)
def test_thresholds(interpreted: Run, threshold: float, found: int) -> None:
    x = torch.zeros(5000)
    x[500:] = 9.0
    x[2000:] = -90.0
    assert interpreted(check_above, x, threshold, 5000) == found


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_finite_is_large(interpreted: Run, dtype: torch.dtype) -> None:
    x = torch.ones(5000, dtype=dtype)
    x[7] = x[31] = float("nan")
    x[BLOCK], x[4999] = float("inf"), -float("inf")
    assert interpreted(check_above, x, 2.0, 10) == 4


@pytest.mark.parametrize("limit", [0, 1000, 10**6])
@pytest.mark.parametrize("threshold", [-1.0, 4.0, 100.0])
def test_above(interpreted: Run, threshold: float, limit: int) -> None:
    n = 2 * BLOCK + 33
    found = interpreted(check_above, values(n, torch.float32, 8), threshold, limit)
    there = {-1.0: n, 4.0: 1500, 100.0: 0}[threshold]
    assert min(limit, there) <= found <= limit


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1, 31, BLOCK - 1, BLOCK + 1, 1 << 20 | 7])
def test_on_a_gpu(n: int, dtype: torch.dtype) -> None:
    x = values(n, dtype, n)
    x[n // 2], x[n // 3] = float("nan"), float("inf")
    for threshold in (-1.0, 0.0, 4.0, float("inf")):
        for limit in (0, 100, n):
            check_above(x, threshold, limit, "cuda")
    check_above(x[1:], 4.0, n, "cuda") if n > 1 else None


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [True, False])
def test_a_selection_on_a_gpu(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CPU finds, and one wait while the threshold fits; without Triton, too."""
    if not compiled:
        monkeypatch.setattr(kernels.GPU, "module", lambda: None)
    memories: list[dict[str, Tensor]] = [{}, {}]
    rng = torch.Generator().manual_seed(0)
    for step in range(6):
        x = torch.randn(300_000, generator=rng)
        there = x.cuda()
        if step:  # samples for a first threshold are others there
            memories[1]["threshold"].copy_(memories[0]["threshold"])
        here = Threshold()(x, 3000, memories[0])
        with synchronised() as waits:
            found = Threshold()(there, 3000, memories[1])
        if step:
            same(found.cpu(), here.long())
            assert len(waits) == 1, waits


@pytest.mark.product
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("kernel", ["_mark", "_compact"])
def test_compiles_for_a_gpu(
    kernel: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gradtide.selectors import triton_kernels

    if "TRITON_INTERPRET" in os.environ:
        pytest.skip("kernels are interpreted here, too")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function = getattr(triton_kernels, kernel)
    names = function.arg_names
    types = dict.fromkeys(names, "*i32")
    types["flat"] = f"*{dtype}"
    types["threshold"] = "*fp64" if dtype == "fp64" else "*fp32"
    types["values"] = types["flat"]
    types |= {"n": "i32", "capacity": "i32"}
    constants = {"BLOCK": BLOCK, "VALUES": True}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=function,
        signature={name: types[name] for name in names},
        constexprs={name: constants[name] for name in constants if name in names},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if types[name] != "constexpr" and name != "capacity"
        },
    )
    options = {k: v for k, v in triton_kernels._LAUNCH.items() if k != "BLOCK"}
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    in_vectors = f"ld.global.v{2 if dtype == 'fp64' else 4}.b"
    assert (in_vectors in made.asm["ptx"]) == (kernel == "_mark")
