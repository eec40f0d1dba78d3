"""Messages without zeros: what is restored is what was shortened, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gradtide.collectives._nonzero import NonZero
from gradtide.collectives.topka2a import TopKA2A
from gradtide.core.ops import Group
from gradtide.core.payload import Payload
from gradtide.testing import lockstep
from gradtide.wire import WIRES, codec_of

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def some(n: int, count: int, dtype: torch.dtype) -> Tensor:
    """Values of which `count` are not zero; one is negative zero, which is kept."""
    rng = torch.Generator().manual_seed(n)
    where = torch.randperm(n, generator=rng)[:count]
    x = torch.zeros(n, dtype=dtype)
    x[where] = torch.randn(count, generator=rng).to(dtype)
    if count > 1:
        x[where[0]] = -0.0
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wire", [None, *WIRES])
@pytest.mark.parametrize("n", [1, 5, 255, 256, 1000, 5001])
def test_a_message_is_restored(wire: Any, dtype: torch.dtype, n: int) -> None:
    codec = codec_of(wire, dtype)
    if not codec.codes(n)[1]:
        assert wire in ("sign", "2bit")
        assert not NonZero(codec, n, 1).pays
        return
    for count in {0, 1, n // 20, n}:
        x = some(n, count, dtype)
        for most in (count, count + 1, 2 * n):
            short = NonZero(codec, n, most)
            message = torch.full((codec.nbytes(n),), 0xAA, dtype=torch.uint8)
            codec.write(x.clone(), message)
            expected, heard = torch.empty_like(x), torch.empty_like(x)
            codec.decode(message, expected)
            sent = torch.full((short.nbytes,), 0x55, dtype=torch.uint8)
            short.shorten(message, sent)
            found = torch.full_like(message, 0x33)
            short.restore(sent, found)
            codec.decode(found, heard)
            assert torch.equal(heard.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("wire", [None, "bf16", "int8", "e3m0"])
def test_a_part_that_became_nan_arrives_so(wire: Any, bad: float) -> None:
    """Of more values than there may be the first arrive, which is enough to see it."""
    codec = codec_of(wire, torch.float32)
    x, heard = torch.full((600,), bad), torch.zeros(600)
    short = NonZero(codec, 600, 10)
    message = torch.zeros(codec.nbytes(600), dtype=torch.uint8)
    codec.write(x, message)
    sent = torch.zeros(short.nbytes, dtype=torch.uint8)
    short.shorten(message, sent)
    short.restore(sent, message)
    codec.decode(message, heard)
    assert (~heard.isfinite()).sum() >= 10


def test_messages_are_as_long_as_is_said() -> None:
    for wire in (None, "bf16", "int8", "e3m0"):
        codec = codec_of(wire, torch.float32)  # type: ignore[arg-type]
        lengths = [NonZero(codec, 4096, most).nbytes for most in range(0, 4096, 64)]
        assert all(length % 8 == 0 for length in lengths)
        assert lengths == sorted(lengths)
        assert NonZero(codec, 4096, 40).pays
        assert not NonZero(codec, 4096, 4096).pays


@pytest.mark.parametrize("wire", [None, "bf16", "int8", "e3m0", "2bit", "sign"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_means_have_the_bits_of_those_with_zeros(
    wire: Any, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def means(steps: int = 3) -> list[Tensor]:
        rng = torch.Generator().manual_seed(size)
        flats = [torch.zeros(3000 * size) for _ in range(size)]
        loads = [Payload(flat, [flat]) for flat in flats]
        found = []
        for _ in range(steps):
            for flat in flats:
                flat += torch.randn(len(flat), generator=rng).pow(3)
            one = TopKA2A(0.01, wire=wire)
            flows = [one.reduce(x, Group(r, size)) for r, x in enumerate(loads)]
            found += [mean.clone() for mean in lockstep(flows)]
        return found + flats

    found = means()
    monkeypatch.setattr(NonZero, "pays", False)
    for own, whole in zip(found, means(), strict=True):
        assert torch.equal(own.view(torch.int32), whole.view(torch.int32))
