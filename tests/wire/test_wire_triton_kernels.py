"""Wires by Triton: the bits of the definition, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Run
from tests.wire.test_blocks import DTYPES, cases, coded
from torch import Tensor

from gradtide.wire import NARROW, WIRES, codec_of, tools
from gradtide.wire.blocks import Blockwise
from gradtide.wire.formats import FORMATS

pytest.importorskip("triton")

ROWS = 16  # blocks of a program that is interpreted: fewer of these take less time


@contextmanager
def encoded_by(found: dict[str, tools.Tool]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tools, "TOOLS", found)
        yield


def same(actual: Tensor, expected: Tensor, about: str) -> None:
    """The same bits, but for those of NaN."""
    actual = actual.cpu()
    if actual.is_floating_point():
        assert torch.equal(actual.isnan(), expected.isnan()), about
        actual, expected = (x.nan_to_num(7, 8, 9) for x in (actual, expected))
    both = (x.view(torch.uint8) for x in (actual, expected))
    assert torch.equal(*both), f"{about}: {actual} is not {expected}"


def samples(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """What there is to encode, of 5 lengths: the longest has all cases."""
    for n in (1, 9, 255, 256):
        found = dict(cases(n, dtype))
        for name in ("heavy tails", "nan"):
            yield f"{n} of {name}", found[name]
    yield "all", torch.cat([values for _, values in cases(1111, dtype)])


def check_codec(wire: Any, dtype: torch.dtype, device: str) -> None:
    """What torch gives on a CPU, and kernels on `device` (on a CPU: interpreted)."""
    kernels = {device: tools.TOOLS["cuda"]._replace(call=lambda f, *x: f(*x))}
    if device == "cpu":
        _as_gpus_do()
    codec = codec_of(wire, dtype)
    for name, values in samples(dtype):
        total = values.nan_to_num(0, 0, 0)
        with encoded_by({}):
            expected = _everything(codec, values, total)
        with encoded_by(kernels):
            found = _everything(codec, values.to(device), total.to(device))
        for what, x in expected.items():
            same(found[what], x, f"{what} of {name}")


def _everything(codec: Any, values: Tensor, total: Tensor) -> dict[str, Tensor]:
    message, heard, rest = coded(codec, values)
    total = total.clone()
    codec.add(torch.stack([message, message]), total)
    levels = codec.witness(message, len(values))
    codes = message[levels.nbytes :]
    return {
        "levels": levels,
        "codes": codes,
        "heard": heard,
        "rest": rest,
        "sum": total,
    }


@cache
def _as_gpus_do() -> None:
    """Triton's interpreter cuts float32 off where bfloat16 ends, and loses subnormals
    of that."""
    import triton.language as tl
    from triton.runtime import interpreter

    from gradtide.wire import triton_kernels

    triton_kernels.ROWS = ROWS

    convert = interpreter._convert_float

    def converted(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            rounded = torch.tensor(x).to(torch.bfloat16)
            return rounded.view(torch.int16).numpy().view("uint16")
        if (source, target) == (tl.bfloat16, tl.float32):
            return x.astype("uint32") << 16
        return convert(x, source, target, mode)

    interpreter._convert_float = converted


@pytest.mark.product(each=12)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wire", WIRES)
def test_kernels_give_the_bits_of_the_definition(
    interpreted: Run, wire: Any, dtype: torch.dtype
) -> None:
    if not codec_of(wire, dtype).exact:
        interpreted(check_codec, wire, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wire", WIRES)
def test_a_gpu_gives_the_bits_of_the_definition(wire: Any, dtype: torch.dtype) -> None:
    check_codec(wire, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("wire", NARROW)
def test_without_triton_a_gpu_gives_the_same_bits(wire: Any) -> None:
    codec = codec_of(wire, torch.float32)
    for name, values in samples(torch.float32):
        with encoded_by({}):
            here, there = coded(codec, values), coded(codec, values.cuda())
        for x, y in zip(there, here, strict=True):
            same(x, y, name)


@pytest.mark.gpu
@pytest.mark.parametrize("wire", WIRES)
def test_nothing_waits_for_the_gpu(wire: Any) -> None:
    codec, values = codec_of(wire, torch.float32), torch.ones(1000, device="cuda")
    coded(codec, values)  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        coded(codec, values)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.product(each=6)
@pytest.mark.parametrize("wire", NARROW)
@pytest.mark.parametrize(
    ("function", "dtype"),
    [("_encode", "fp32"), ("_encode", "fp64"), ("_add", "fp32"), ("_add", "bf16")],
)
def test_compiles_for_a_gpu(
    function: str, dtype: str, wire: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """In vectors; divisions are IEEE's; nothing is fused or flushed to zero."""
    import triton.language as tl
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gradtide.wire import triton_kernels

    if "TRITON_INTERPRET" in os.environ:
        pytest.skip("kernels are interpreted here, too")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kind, plane, _ = Blockwise(FORMATS[wire])._kind
    kernel = getattr(triton_kernels, function)
    constants = {"KIND": kind, "PLANE": plane, "ROWS": triton_kernels.ROWS}
    if function == "_add":
        constants |= {"FRESH": True, "MOST": 1e4 if dtype == "bf16" else 0.0}
        constants["WIDE"] = tl.float64 if dtype == "fp64" else tl.float32
    pointers = {"x": f"*{dtype}", "levels": "*fp32", "codes": "*u8"}
    types = dict.fromkeys(kernel.arg_names, "i32") | pointers
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature={name: types[name] for name in kernel.arg_names},
        constexprs=constants,
        attrs={(kernel.arg_names.index("x"),): [["tt.divisibility", 16]]},
    )
    options = dict(triton_kernels._LAUNCH)
    text = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    divided = function == "_encode"
    assert ("div.rn.f32" in text) == divided
    assert not [
        word for word in ("fma.", ".ftz", "div.full", ".approx") if word in text
    ]
    vector = {"fp32": ".v4.b32", "fp64": ".v2.b64", "bf16": ".v4.b32"}[dtype]
    assert f"{'ld' if divided else 'st'}.global{vector}" in text
