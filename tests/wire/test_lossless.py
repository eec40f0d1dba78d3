"""Values without loss: what was written is read, bit for bit, in few bytes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from gradtide.planner.rehearsal.op_counts import Counter
from gradtide.wire import lossless
from gradtide.wire.lossless import (
    COPIES,
    HEAD,
    INTEGERS,
    SHORTER,
    SLOWER,
    Lossless,
    Message,
)

TOOLS = ("numba", "torch")
NUMELS = (1, 2, 100, 255, 256, 257, 511, 512, 1000, 5000)


@contextmanager
def using(tool: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if tool == "torch":
            patch.setitem(sys.modules, "gradtide.wire.fast_lossless", None)
        lossless.KERNELS.forget()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = lossless.KERNELS.module()
        assert (found is None) == (tool == "torch")
        yield
    lossless.KERNELS.forget()


def kinds(n: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradients, such with many sizes, with zeros, and any bits that there are."""
    rng = torch.Generator().manual_seed(n)
    normal, other = torch.randn(2, n, generator=rng).unbind()
    bits = torch.randint(-(2**31), 2**31, (n,), generator=rng)
    odd = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, 3e38, 1e-30]
    places = torch.randint(0, len(odd), (n,), generator=rng)
    rare = torch.where(other > 1.5, torch.tensor(odd)[places], normal)
    found = {
        "normal": normal,
        "cubed": 1e-6 * normal**3,
        "zeros": torch.zeros(n),
        "half": normal * (other > 0),
        "rare": rare,
        "growing": torch.exp2(torch.arange(n) % 250 - 120.0),
    }
    cast = {name: x.to(dtype) for name, x in found.items()}
    return cast | {"bits": bits.to(INTEGERS[dtype]).view(dtype)}


def written(x: Tensor) -> Tensor:
    """A message, of which all is set that does not matter."""
    own = Lossless(x.dtype, len(x))
    message = torch.zeros(own.room, dtype=torch.uint8)
    own.write(x, message)
    message[length(message) :] = 255
    return message


def length(message: Tensor) -> int:
    return int(message[:8].view(torch.int64))


def heard(message: Tensor, like: Tensor) -> Tensor:
    out = torch.full_like(like, 7)
    Lossless(like.dtype, len(like)).read(Message(message, message[:HEAD]), out)
    return out


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("n", NUMELS)
def test_what_was_written_is_read(n: int, dtype: torch.dtype) -> None:
    """By either tool, which write the same bytes."""
    pytest.importorskip("numba")
    for name, x in kinds(n, dtype).items():
        bits, messages = x.view(INTEGERS[dtype]), []
        for tool in TOOLS:
            with using(tool):
                messages.append(written(x))
            for reader in TOOLS:
                with using(reader):
                    found = heard(messages[-1], x).view(INTEGERS[dtype])
                assert found.equal(bits), (name, tool, reader)
        assert messages[0].equal(messages[1]), name
        assert length(messages[0]) <= HEAD + x.nbytes


@pytest.mark.parametrize("tool", TOOLS)
def test_what_gradients_take(tool: str) -> None:
    """Near the entropy of their exponents; and no more than as they are."""
    if tool == "numba":
        pytest.importorskip("numba")
    n = 1 << 16
    with using(tool):
        for dtype, most in ((torch.bfloat16, 0.70), (torch.float32, 0.85)):
            found = kinds(n, dtype)
            assert length(written(found["normal"])) < most * n * dtype.itemsize
            assert length(written(found["zeros"])) < most * n * dtype.itemsize
            assert length(written(found["bits"])) <= HEAD + n * dtype.itemsize


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_what_a_rehearsal_takes_for_likely(dtype: torch.dtype) -> None:
    """Without numbers there are no lengths: those of gradients stand in."""
    own, x = Lossless(dtype, 1000), torch.empty(1000, dtype=dtype, device="meta")
    message = torch.empty(own.room, dtype=torch.uint8, device="meta")
    own.write(x, message)
    own.read(Message(message, message[:HEAD]), x)
    assert own.length(message[:HEAD]) == own.likely
    assert own.likely == HEAD + round(1000 * (dtype.itemsize - SHORTER))
    assert own.likely < own.room


@pytest.mark.parametrize("tool", TOOLS)
def test_a_rehearsal_knows_how_long_encoding_takes(tool: str) -> None:
    if tool == "numba":
        pytest.importorskip("numba")
    own = Lossless(torch.bfloat16, 1000)
    x = torch.empty(1000, dtype=torch.bfloat16, device="meta")
    message = torch.empty(own.room, dtype=torch.uint8, device="meta")
    for work in (
        lambda: own.write(x, message),
        lambda: own.read(Message(message, message[:HEAD]), x),
    ):
        with using(tool), Counter() as counter:
            work()
        copies = COPIES if tool == "numba" else COPIES * SLOWER
        assert counter.read().moved == copies * len(x)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("head", [(10**6, 5, 0), (400, 5, -1), (0, 10**9, 10**9)])
def test_a_head_that_cannot_be_is_refused(
    tool: str, head: tuple[int, int, int]
) -> None:
    if tool == "numba":
        pytest.importorskip("numba")
    with using(tool):
        x = torch.ones(1000)
        message = written(x)
        message[:HEAD].view(torch.int64).copy_(torch.tensor(head))
        with pytest.raises(ValueError, match="no message of 1000 values"):
            heard(message, x)


def test_fewer_exponents_apart_than_planes_say_are_no_harm() -> None:
    """Compiled code has no other guard than its own."""
    pytest.importorskip("numba")
    x = kinds(1000, torch.float32)["cubed"]
    with using("numba"):
        message = written(x)
        total, apart, others = message[:HEAD].view(torch.int64).tolist()
        assert apart > 20
        own = torch.tensor([total - 10, apart - 20, others])
        message[:HEAD].view(torch.int64).copy_(own)
        assert len(heard(message, x)) == 1000


def test_what_is_compiled_has_the_same_layout() -> None:
    pytest.importorskip("numba")
    import gradtide.wire.fast_lossless as fast

    for name in ("BLOCK", "PLANE", "PLANES", "FAR", "ZERO", "OTHER"):
        assert int(getattr(fast, name)) == getattr(lossless, name), name
