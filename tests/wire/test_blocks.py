"""Codecs: what a message holds and what stays add up; compiled, the same bits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.waits import Waits
from torch import Tensor

from gradtide.wire import NARROW, WIRES, Codec, codec_of, round_off, tools
from gradtide.wire import blocks as module
from gradtide.wire.formats import BLOCK, FORMATS, TINY

LENGTHS = (1, 2, 3, 7, 8, 9, 33, 255, 256, 257, 511, 512, 1000, 20_000)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
EXACT = (torch.float32, torch.float64)  # dtypes that hold what codecs decode


@pytest.fixture(params=["numba", "torch"])
def tool(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numba":
        pytest.importorskip("numba")
    else:
        monkeypatch.delitem(tools.TOOLS, "cpu")
    return str(request.param)


def cases(n: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    normal = torch.randn(n, generator=torch.Generator().manual_seed(n)).double()
    yield "heavy tails", normal.pow(3).to(dtype)
    yield "zeros", torch.zeros(n, dtype=dtype)
    yield "mostly zeros", (normal * (normal > 1)).to(dtype)
    yield "alike", torch.full((n,), 0.3, dtype=dtype)
    yield "signs", normal.sign().to(dtype)
    yield "subnormal", (normal * 1e-40).to(dtype)
    yield "around the smallest", (normal * TINY).to(dtype)
    yield "large", (normal * 1e37).clamp(-3.4e38, 3.4e38).to(dtype)
    for bad in (math.inf, -math.inf, math.nan):
        normal[n // 3 : n // 3 + 1] = bad
        yield f"{bad}", normal.to(dtype)


def coded(codec: Codec, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A message, what it decodes to, and what it does not hold."""
    rest = values.clone()
    message = torch.zeros(codec.nbytes(len(values)), dtype=torch.uint8)
    codec.encode(rest, message)
    heard = torch.full_like(values, 7)
    codec.decode(message, heard)
    return message, heard, rest


@pytest.mark.product(each=12)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wire", WIRES)
def test_a_codec_keeps_its_contract(tool: str, wire: Any, dtype: torch.dtype) -> None:
    codec = codec_of(wire, dtype)
    for n in LENGTHS:
        for name, values in cases(n, dtype):
            message, heard, rest = coded(codec, values)
            finite, about = heard.isfinite(), f"{n} of {name}"
            assert rest.isfinite().all(), about
            largest = values.nan_to_num(0, 0, 0).abs().max()
            near = {"rtol": 0, "atol": 5e-7 * float(largest)}
            if dtype in EXACT:
                sums = (heard + rest)[finite]
                torch.testing.assert_close(sums, values[finite], **near, msg=about)
            # What is finite and shares a block with what is not stays as a whole.
            stays = ~finite & values.isfinite() & values.to(codec.dtype).isfinite()
            assert torch.equal(rest[stays], values[stays]), about
            alarm = bool(codec.witness(message[None], n).isfinite().all())
            assert alarm == bool(values.to(codec.dtype).isfinite().all()), about
            if dtype in EXACT:
                again = coded(codec, heard)[1]
                assert torch.equal(again[finite], heard[finite]), f"again: {about}"
                total = values.nan_to_num(0, 0, 0)
                sums = (total + 2 * heard.double())[finite].to(dtype)
                codec.add(torch.stack([message, message]), total)
                torch.testing.assert_close(total[finite], sums, **near, msg=about)


@pytest.mark.product
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wire", FORMATS)
def test_compiled_codecs_give_the_bits_of_the_definition(
    wire: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    codec = codec_of(wire, dtype)
    found: list[list[Tensor]] = []
    for compiled in (True, False):
        if not compiled:
            monkeypatch.delitem(tools.TOOLS, "cpu")
        found.append([])
        for n in LENGTHS:
            for _, values in cases(n, dtype):
                total = values.nan_to_num(0, 0, 0)
                message, heard, rest = coded(codec, values)
                codec.add(torch.stack([message, message]), total)
                found[-1] += [message, heard, rest, total]
    for compiled, defined in zip(*found, strict=True):
        torch.testing.assert_close(compiled, defined, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("wire", "width"),
    [("int8", 8.125), ("e3m0", 4.125), ("2bit", 2.25), ("sign", 1.125)],
)
def test_messages_are_as_long_as_is_said(wire: Any, width: float) -> None:
    codec = codec_of(wire, torch.float32)
    assert 8 * codec.width == width
    assert 8 * codec.nbytes(4 * BLOCK) == width * 4 * BLOCK
    lengths = [codec.nbytes(n) for n in range(600)]
    assert lengths == sorted(lengths)
    assert all(length % 4 == 0 for length in lengths)
    assert all(8 * length >= width * n for n, length in enumerate(lengths))


def test_what_codes_stand_for() -> None:
    values = torch.tensor([1.0, -0.5, 0.3, 0.0125, 0.0, -1.0])
    expected = {
        # Seven powers of two; log2 is rounded, and what is below 2^-6.5 is 0.
        "e3m0": [1.0, -0.5, 0.25, 2.0**-6, 0.0, -1.0],
        # The means of 0.3, 0.0125 and 0, and of those above 0.46875.
        "2bit": [5 / 6, -5 / 6, 0.104167, 0.104167, 0.104167, -5 / 6],
        "sign": [0.46875, -0.46875, 0.46875, 0.46875, 0.46875, -0.46875],
        "int8": [1.0, -63 / 127, 38 / 127, 2 / 127, 0.0, -1.0],
    }
    for wire, wanted in expected.items():
        heard = coded(codec_of(wire, torch.float32), values)[1]  # type: ignore[arg-type]
        torch.testing.assert_close(heard, torch.tensor(wanted), rtol=5e-4, atol=0)


@pytest.mark.parametrize("wire", FORMATS)
def test_errors_are_no_larger_than_the_format_allows(wire: Any) -> None:
    """In terms of the norm, as error feedback needs it: it shrinks what is left."""
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    left = float(coded(codec_of(wire, torch.float32), values)[2].norm() / values.norm())
    most = {"int8": 0.008, "e3m0": 0.21, "2bit": 0.37, "sign": 0.61}[wire]
    assert 0.5 * most < left < most


def test_rounding_in_place_says_what_it_takes() -> None:
    values = torch.randn(1000)
    for wire in WIRES:
        rounded = values.clone()
        rest = round_off(rounded, codec_of(wire, torch.float32))
        torch.testing.assert_close(rounded + rest, values)
        assert rest.any()
    assert not round_off(values.clone(), codec_of(None, torch.float32)).any()


@pytest.mark.parametrize("wire", WIRES)
def test_nothing_is_a_message_of_no_bytes(tool: str, wire: Any) -> None:
    message, heard, rest = coded(codec_of(wire, torch.float32), torch.empty(0))
    assert len(message) == len(heard) == len(rest) == 0


def test_values_never_become_wider() -> None:
    half = torch.bfloat16
    assert codec_of("fp16", half) == codec_of(None, half)
    assert codec_of("bf16", torch.float16).exact
    assert codec_of("int8", half).width < 2
    assert set(NARROW) == set(FORMATS)


def test_without_numba_there_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gradtide.wire.fast", None)
    monkeypatch.delattr("gradtide.wire.fast", raising=False)
    kernels = tools.TOOLS["cpu"].kernels
    kernels.forget()
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            coded(codec_of("int8", torch.float32), torch.ones(10))
        assert "gradtide[fast]" in str(said[0].message)
    finally:
        kernels.forget()


def test_waits_are_seen() -> None:
    x = torch.ones(3)
    with Waits() as waits:
        x.new_tensor(1.0)
        float(x[0])
        x[x > 0]
    assert waits == ["aten.lift_fresh", "aten._local_scalar_dense", "aten.index"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wire", WIRES)
def test_nothing_waits_for_a_device(
    wire: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers, too, are filled in there: to copy them the host waits."""
    monkeypatch.delitem(tools.TOOLS, "cpu")
    monkeypatch.setattr(module, "_all", lambda mask: False)  # as it is on a GPU
    codec, values = codec_of(wire, dtype), torch.randn(1000).to(dtype)
    message = torch.zeros(codec.nbytes(1000), dtype=torch.uint8)
    with Waits() as waits:
        codec.encode(values, message)
        codec.decode(message, values)
        codec.add(message[None], values)
        codec.witness(message[None], 1000)
    assert not waits


def test_shapes_without_memory_have_messages() -> None:
    codec = codec_of("int8", torch.float32)
    values = torch.empty(1000, device="meta")
    message = torch.empty(codec.nbytes(1000), dtype=torch.uint8, device="meta")
    codec.encode(values, message)
    codec.decode(message, values)
    codec.add(message[None], values)
    assert codec.witness(message[None], 1000).shape == (1, 4)
