"""Sorted indices as bytes: what was written is read, in the length that is said."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gradtide.wire import indices
from gradtide.wire.indices import Indices, first_ones

SPANS = (1, 2, 7, 8, 9, 100, 65_535, 65_537, 1_000_000)


@pytest.fixture(params=["numba", "torch"])
def tool(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "numba":
        pytest.importorskip("numba")
    else:
        monkeypatch.setitem(sys.modules, "gradtide.wire.fast_indices", None)
    indices.KERNELS.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        indices.KERNELS.module()
    yield str(request.param)
    indices.KERNELS.forget()


def cases(span: int) -> Iterator[Tensor]:
    rng = torch.Generator().manual_seed(span)
    for count in sorted(
        {1, 2, 3, span // 100, span // 3, span} & {*range(1, span + 1)}
    ):
        found = torch.randperm(span, generator=rng)[:count].sort().values
        yield found.to(torch.int32)
        yield torch.full((count,), span - 1, dtype=torch.int32)
        yield torch.arange(count, dtype=torch.int32)


def written(own: Indices, where: Tensor) -> Tensor:
    message = torch.full((own.nbytes,), 0xAA, dtype=torch.uint8)
    own.encode(where, message)
    return message


@pytest.mark.parametrize("span", SPANS)
def test_what_was_written_is_read(tool: str, span: int) -> None:
    for where in cases(span):
        for room in (len(where), len(where) + 1, 3 * len(where)):
            own = Indices(room, span)
            heard = own.decode(written(own, where), len(where), torch.int32)
            assert heard.dtype == torch.int32
            assert torch.equal(heard, where), f"{len(where)} of {room} below {span}"


def test_nothing_takes_no_bytes(tool: str) -> None:
    nothing = torch.empty(0, dtype=torch.int32)
    assert Indices(0, 1000).nbytes == 0
    for own in (Indices(0, 1000), Indices(0, 0), Indices(7, 1000)):
        assert not len(own.decode(written(own, nothing), 0, torch.int32))


@pytest.mark.parametrize("span", SPANS)
def test_compiled_bytes_are_those_of_the_definition(
    span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    indices.KERNELS.forget()
    for where in cases(span):
        for room in (len(where), 2 * len(where)):
            own = Indices(room, span)
            found = written(own, where)
            with monkeypatch.context() as patched:
                patched.setattr(indices, "_compiled", lambda _: None)
                assert torch.equal(found, written(own, where))
                assert torch.equal(own.decode(found, len(where), torch.int32), where)


@pytest.mark.parametrize("byte", [0, 1, 255])
def test_what_is_no_message_is_read_alike(
    byte: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As answers that are made up, for a plan, may be."""
    pytest.importorskip("numba")
    own = Indices(40, 5000)
    message = torch.full((own.nbytes,), byte, dtype=torch.uint8)
    found = own.decode(message, 40, torch.int32)
    monkeypatch.setattr(indices, "_compiled", lambda _: None)
    assert torch.equal(found, own.decode(message, 40, torch.int32))


def test_wide_indices_are_read_too() -> None:
    """Of buckets that are longer than what 32 bits count."""
    span = 1 << 33
    where = torch.tensor([0, 5, (1 << 31) + 7, span - 1], dtype=torch.int64)
    own = Indices(4, span)
    assert torch.equal(own.decode(written(own, where), 4, torch.int64), where)


@pytest.mark.parametrize("density", [0.0001, 0.001, 0.01, 0.02, 0.1, 0.3, 0.9])
def test_bits_are_near_the_fewest_that_any_code_needs(density: float) -> None:
    span = 10_000_000
    count = round(density * span)
    own = Indices(count, span)
    fewest = math.lgamma(span + 1) - math.lgamma(count + 1)
    fewest = (fewest - math.lgamma(span - count + 1)) / math.log(2)
    bits = 8 * own.nbytes / count
    assert fewest / count <= bits <= max(math.log2(1 / density), 0) + 2.01
    others = [count * low + count + (span >> low) for low in range(24)]
    assert 8 * own.nbytes <= min(others) + 16  # no other number of low bits is shorter


def test_bits_of_the_documentation() -> None:
    """docs/schemes.md says how long an index is."""
    found = [
        round(8 * Indices(round(d * 10**7), 10**7).nbytes / (d * 10**7), 1)
        for d in (0.001, 0.01, 0.02, 0.1)
    ]
    assert found == [12.0, 8.6, 7.6, 5.2]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_ones_that_are_missing_are_behind_the_last(device: str) -> None:
    flags = torch.tensor([0, 1, 0, 1, 1], dtype=torch.uint8)
    if device == "cpu":
        assert first_ones(flags, 2).tolist() == [1, 3]
        assert first_ones(flags, 5).tolist() == [1, 3, 4, 5, 5]
    else:
        assert first_ones(flags.to(device), 5).shape == (5,)


def test_on_devices_the_same_ones_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = torch.rand(1000, generator=torch.Generator().manual_seed(0)) < 0.2
    expected = first_ones(flags, 300)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    assert torch.equal(first_ones(flags, 300), expected)
